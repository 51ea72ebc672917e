"""Open WebUI with its default settings through an outage of the verifier, as its user sees it in a
browser.

It brings 3 GB, so `make clients` does not install it: the test is skipped where there is no
`open-webui` on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa.process.listening import Port
from testing.verifier import Emulated, verifier
from tests.clients.conftest import PATIENCE, Device, online

playwright = pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
WEBUI = shutil.which("open-webui")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(WEBUI is None or CHROMIUM is None, reason="needs Open WebUI and Chromium"),
]
CARRY = "What is 58 + 67 - 39?"
STORY = "Write a short story about Ada, a fox and a garden."
SILENT = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_OLLAMA_API": "False",
    "WEBUI_AUTH": "False",
}
"""It fetches nothing, and has no other models and no log-in."""


@pytest.fixture
def webui(apart: tuple[Device, str], tmp_path: Path) -> Iterator[Any]:
    """Its page, in front of a device whose verifier is not there yet."""
    assert WEBUI is not None
    with Port("127.0.0.1", 0) as free:
        port = str(free.number)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "OPENAI_API_KEY")
    }
    environment |= {
        "DATA_DIR": str(tmp_path),
        "OPENAI_API_BASE_URL": f"{apart[0].address}/v1",
        **SILENT,
    }
    with (tmp_path / "log").open("wb") as log:
        command = [WEBUI, "serve", "--host", "127.0.0.1", "--port", port]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 2 * PATIENCE
            while time.monotonic() < deadline:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                    time.sleep(0.5)
            with playwright.sync_playwright() as tool:
                browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = browser.new_page(base_url=f"http://127.0.0.1:{port}")
                page.set_default_timeout(1000 * PATIENCE)
                page.goto("/")
                page.get_by_text("Okay, Let's Go!").click()
                yield page
                browser.close()
        finally:
            process.terminate()
            process.wait(PATIENCE)


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
        playwright.expect(webui.locator(".chat-assistant")).to_contain_text(
            "Ada", timeout=1000 * PATIENCE
        )
        began = time.monotonic()
        running.process.kill()
        running.process.wait(PATIENCE)
        assert len(told("killed in mid-answer", began)) > 100
    with verifier("--port", port, threads=1):
        device.until(online)
        assert told("back again", ask(webui, CARRY)) == verified
    print(seconds)  # `pytest -rP` shows them
    assert max(seconds.values()) < 30  # see docs/serve.md
