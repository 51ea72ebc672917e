"""Open WebUI with its default settings through an outage of the verifier: as its user sees it in a
browser, and beside a real pair (`real_pair.py`) as its page asks for it over HTTP.

It brings 3 GB, so `make clients` does not install it: the tests are skipped where there is no
`open-webui` on the PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa.process.listening import Port
from testing.verifier import Emulated, verifier
from tests.clients.conftest import CHROMIUM, PATIENCE, Device, online
from tests.clients.real_pair import (
    BUNDLE,
    MOST,
    TARGET,
    InThread,
    Program,
    running,
    target,
    what_is,
)

WEBUI = shutil.which("open-webui")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WEBUI is None, reason="needs Open WebUI"),
]
CONTEXT = os.environ.get("MOA_CONTEXT", "")
"""Tokens of the real pair's context, if it is to have fewer than it can: then Open WebUI's own tools,
which are 6,000 tokens, are left out."""
CARRY = "What is 58 + 67 - 39?"
STORY = "Write a short story about Ada, a fox and a garden."
FETCHES_NOTHING = {"OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1"}
NO_LOG_IN = {"ENABLE_OLLAMA_API": "False", "WEBUI_AUTH": "False"}
"""Nor are there other models."""


@contextlib.contextmanager
def serving(folder: Path, endpoint: str, **more: str) -> Iterator[str]:
    """It, in front of this endpoint; its address."""
    assert WEBUI is not None
    with Port("127.0.0.1", 0) as free:
        port = str(free.number)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "OPENAI_API_KEY")
    }
    environment |= {"DATA_DIR": str(folder), "OPENAI_API_BASE_URL": f"{endpoint}/v1"}
    environment |= FETCHES_NOTHING | more
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        command = [WEBUI, "serve", "--host", "127.0.0.1", "--port", port]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + MOST
            while time.monotonic() < deadline:
                try:
                    httpx.get(f"{address}/health", trust_env=False).raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, (folder / "log").read_text()[-2000:]
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.fixture
def webui(apart: tuple[Device, str], tmp_path: Path) -> Iterator[Any]:
    """Its page, in front of a device whose verifier is not there yet."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
    with (
        serving(tmp_path, apart[0].address, **NO_LOG_IN) as address,
        playwright.sync_playwright() as tool,
    ):
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(base_url=address)
        page.set_default_timeout(1000 * PATIENCE)
        page.goto("/")
        page.get_by_text("Okay, Let's Go!").click()
        yield page
        browser.close()


def ask(page: Any, question: str) -> float:
    """Ask in a new chat; when that was."""
    page.goto("/")
    page.locator("#chat-input").click()
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    return time.monotonic()


def answer(page: Any) -> str:
    """The answer, when it is complete; no error may be seen."""
    page.locator(".copy-response-button").wait_for()
    assert page.locator("[data-sonner-toast]").all_inner_texts() == []
    return str(page.locator(".chat-assistant").inner_text())


def test_an_outage_is_no_error_and_every_answer_comes(
    apart: tuple[Device, str], webui: Any
) -> None:
    device, port = apart
    seconds: dict[str, float] = {}

    def told(situation: str, began: float) -> str:
        text = answer(webui)
        seconds[situation] = round(time.monotonic() - began, 2)
        return text

    assert told("down from the start", ask(webui, CARRY))
    with verifier("--port", port, emulated=Emulated(step_ms=100), threads=1) as running:
        device.until(online)
        verified = told("up", ask(webui, CARRY))
        ask(webui, STORY)
        webui.locator(".chat-assistant").filter(has_text="Ada").wait_for()
        began = time.monotonic()
        running.process.kill()
        running.process.wait(PATIENCE)
        assert len(told("killed in mid-answer", began)) > 100
    with verifier("--port", port, threads=1):
        device.until(online)
        assert told("back again", ask(webui, CARRY)) == verified
    print(seconds)  # `pytest -rP` shows them
    assert max(seconds.values()) < 30  # see docs/serve.md


# ---- beside a real pair


class Heard(InThread):
    """A relay in front of an endpoint: which requests came, and which answers."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.address = ""
        self.answers: Counter[str] = Counter()
        """How often each status came for each path."""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self.target)
        asked: list[str] = []
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._carry(reader, onward, asked, rb"(?:POST|GET) (\S+) HTTP/1\.1\r\n"),
                self._carry(there, writer, asked, rb"HTTP/1\.1 (\d+) "),
            )

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        asked: list[str],
        begins: bytes,
    ) -> None:
        while data := await source.read(65536):
            if found := re.match(begins, data):
                word = found[1].decode()
                if word.isdigit():
                    self.answers[f"{asked.pop(0)} {word}"] += 1
                else:
                    asked.append(word)
            sink.write(data)
            await sink.drain()
        sink.close()


class Page:
    """What its page does, without a browser: an account, chats, and what it asks for beside them."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, timeout=MOST, trust_env=False)
        account = {"name": "Ada", "email": "ada@localhost.example", "password": "Lovelace-1815"}
        token = self._post("/api/v1/auths/signup", account)["token"]
        self._client.headers["authorization"] = f"Bearer {token}"
        [self.model] = [one["id"] for one in self._get("/api/models")["data"]]

    def _get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(path, json=body).raise_for_status().json()

    def ask(self, question: str) -> tuple[str, str]:
        """Ask in a new chat; the chat, and the message that the answer will be."""
        asked, answer = str(uuid.uuid4()), str(uuid.uuid4())
        message = {
            "id": asked,
            "parentId": None,
            "childrenIds": [answer],
            "role": "user",
            "content": question,
            "timestamp": int(time.time()),
            "models": [self.model],
        }
        body = {
            "stream": True,
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "params": {},
            "tool_servers": [],
            "features": {
                "voice": False,
                "image_generation": False,
                "code_interpreter": False,
                "web_search": False,
            },
            "variables": {"{{USER_NAME}}": "Ada", "{{USER_LANGUAGE}}": "en-US"},
            "session_id": "session-of-a-page",
            "parent_id": None,
            "user_message": message,
            "message_ids": [{"model_id": self.model, "message_id": answer}],
            "background_tasks": {
                "title_generation": True,
                "tags_generation": True,
                "follow_up_generation": True,
            },
        }
        return self._post("/api/chat/completions", body)["chat_id"], answer

    def message(self, asked: tuple[str, str]) -> dict[str, Any]:
        """The answer as its page has it now."""
        chat = self._get(f"/api/v1/chats/{asked[0]}")["chat"]
        return dict(chat["history"]["messages"].get(asked[1], {}))

    def until(self, asked: tuple[str, str], *, letters: int = 0) -> dict[str, Any]:
        """Wait for so many letters of the answer, or for its end, and the end of all beside it."""
        deadline = time.monotonic() + MOST
        while time.monotonic() < deadline:
            message = self.message(asked)
            assert "error" not in message, message
            if letters and len(text_of(message)) >= letters:
                return message
            if message.get("done") and not self._get(f"/api/tasks/chat/{asked[0]}")["task_ids"]:
                return message
            time.sleep(0.5)
        raise TimeoutError(message)

    def title(self, asked: tuple[str, str]) -> str:
        return str(self._get(f"/api/v1/chats/{asked[0]}")["title"])


def text_of(message: dict[str, Any]) -> str:
    return str(message.get("content", ""))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not (TARGET and BUNDLE), reason="needs MOA_TARGET and MOA_BUNDLE")
def test_beside_a_real_pair_nothing_is_refused(tmp_path: Path) -> None:
    """Absent, there, killed in mid-answer, back: each answer comes, and no status but 200. Whose text
    it is, is not asked: in mode `keep` the device answers where a busy verifier is late."""
    with Port("127.0.0.1", 0) as free:
        endpoint = free.number
    question = what_is("a mutex")
    with contextlib.ExitStack() as open_until_the_end:
        shorter = ["--max-context-tokens", CONTEXT] if CONTEXT else []
        verifier, link = open_until_the_end.enter_context(target(*shorter))
        link.does("go_down")
        device = ["serve", "--bundle", BUNDLE, "--verifier", f"ws://127.0.0.1:{link.port}"]
        device += ["--port", str(endpoint)]
        program = Program("edge_client.cli", device, "chat page and API at")
        open_until_the_end.enter_context(running(program))
        heard = open_until_the_end.enter_context(Heard(endpoint))
        page = Page(open_until_the_end.enter_context(serving(tmp_path, heard.address)))
        told: dict[str, str] = {}

        def tell(situation: str, asked: tuple[str, str], began: float) -> None:
            page.until(asked, letters=1)
            first = time.monotonic()
            told[situation] = text_of(page.until(asked))
            seconds = f"{first - began:.1f} s, {time.monotonic() - began:.1f} s"
            print(f"{situation}: {seconds}, {page.title(asked)!r}: {told[situation]!r}", flush=True)
            print(f"  {dict(heard.answers)}", flush=True)
            assert told[situation]

        tell("absent", page.ask(question), time.monotonic())
        link.does("restore")
        until_online(endpoint)
        tell("there", page.ask(question), time.monotonic())
        asked = page.ask(what_is("a hash table"))
        page.until(asked, letters=20)
        began = time.monotonic()
        verifier.kill()
        tell("killed", asked, began)
        verifier.start()
        verifier.wait()
        until_online(endpoint)
        tell("back", page.ask(question), time.monotonic())
    assert {name.rpartition(" ")[2] for name in heard.answers} == {"200"}


def until_online(endpoint: int) -> None:
    deadline = time.monotonic() + MOST
    while time.monotonic() < deadline:
        status = httpx.get(f"http://127.0.0.1:{endpoint}/moa/status", trust_env=False).json()
        if online(status):
            return
        time.sleep(0.2)
    raise TimeoutError(status)
