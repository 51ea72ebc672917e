"""The web app in Chromium, from a static host that sends no headers: the device in a page, alone
and with a verifier.

`MOA_NPM=DIR` names a folder with the archives of `edge_client/tools/web_app.py:PACKAGES`; without
it npm gets them. `MOA_PICTURES=docs/pictures` writes the pictures anew, `MOA_ROUNDS=50` ends
answers so often; `pytest -s` shows figures. `MOA_PROMPTS=200` asks so many prompts over the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import http.server
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.openai.endpoint import endpoint
from cloud_verifier.serving.auth import Authenticator
from edge_client import Done, EdgeClient, Notice
from edge_client.device import Device, embedded_bundle
from edge_client.tools.compare import TimedAnswer
from edge_client.tools.compare import ask as ask_python
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from edge_client.tools.web_app import WebAppSettings, build_web_app
from moa import demo
from moa.graph.drafter import run
from moa.process.listening import Port
from moa.sampling import SamplingSettings
from tests.clients.conftest import CHROMIUM, PATIENCE, visits
from tests.edge.serve.pair import SETTINGS, served

pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
from tests.clients.test_browser import SLOW, STORY, ask, complete, picture, tile, written

NPM = os.environ.get("MOA_NPM", "")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (NPM or shutil.which("npm")), reason="needs npm"),
    pytest.mark.filterwarnings("default"),
]
FIRST_VISIT = 4.7e6
"""Bytes over the wire with the embedded bundle."""
ROUNDS = int(os.environ.get("MOA_ROUNDS", "1"))
"""Of a cut, a reload, a kill and a reload without network."""
PROMPTS = int(os.environ.get("MOA_PROMPTS", "6"))
"""Each greedily and sampled; the links take turns."""
LINKS = ("wifi", "4g", "4g-weak")
STEP_SECONDS = 0.025
"""A forward of a larger target than the embedded one."""
Opened = Callable[..., Any]


class Host(http.server.ThreadingHTTPServer):
    """A static host; counts what it sends, by path."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.sent: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), functools.partial(_Files, directory=str(folder)))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Files(http.server.SimpleHTTPRequestHandler):
    extensions_map = MappingProxyType(
        {**http.server.SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}
    )

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        self.server.sent[self.path] += len(content)  # type: ignore[attr-defined]
        outputfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class Cloud:
    """A verifier in a thread; its endpoint behind an emulated link, and its own port without one."""

    def __init__(self) -> None:
        self.pause = 0.0
        """Seconds that each forward of the target takes longer."""
        self.forwards = 0
        self._pair = served()
        self.url = self._origin = ""
        """The verifier's port."""
        self.endpoint = ""
        self._link: LinkProxy | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._up = threading.Event()
        forward = self._pair.target.forward

        def slowly(*rows: Any) -> Any:
            self.forwards += 1
            time.sleep(self.pause)
            return forward(*rows)

        self._pair.target.forward = slowly  # type: ignore[method-assign]

    def start(self, origin: str) -> None:
        self._origin = origin
        threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True).start()
        assert self._up.wait(PATIENCE)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)

    def use(self, link: str) -> None:
        """Change the link."""
        assert self._loop is not None
        assert self._link is not None
        self._loop.call_soon_threadsafe(self._link.use, PROFILES[link])

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        auth = Authenticator()
        settings = replace(SETTINGS, origins=(self._origin,), openai="0")
        verifier = Verifier(self._pair, settings, auth)
        beside = endpoint(
            verifier,
            port=Port("127.0.0.1", 0),
            tokenizer=self._pair.target.tokenizer,
            settings=settings,
            auth=auth,
        )
        async with (
            verifier.open(),
            beside as address,
            LinkProxy("127.0.0.1", urlsplit(address).port or 0) as self._link,
        ):
            self.url = verifier.transport.url
            self.endpoint = f"http://127.0.0.1:{self._link.port}"
            self._up.set()
            await self._over.wait()


def build(folder: Path, verifier: str = "") -> None:
    settings = WebAppSettings(
        out=folder,
        bundle=embedded_bundle(),
        demo=True,
        verifiers=(verifier,) if verifier else (),
        packages=Path(NPM) if NPM else None,
    )
    size = build_web_app(settings)
    print(f"\na first visit: {size:,} bytes")
    assert size < FIRST_VISIT


@contextlib.contextmanager
def hosted(folder: Path) -> Iterator[Host]:
    with Host(folder) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        yield host
        host.shutdown()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app without a verifier."""
    folder = tmp_path_factory.mktemp("alone") / "page"
    build(folder)
    return folder


@pytest.fixture(scope="module")
def alone(built: Path) -> Iterator[Host]:
    """The same on a host."""
    with hosted(built) as host:
        yield host


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    running = Cloud()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, cloud: Cloud) -> Iterator[Host]:
    """The app of that verifier."""
    folder = tmp_path_factory.mktemp("app") / "page"
    with hosted(folder) as host:
        cloud.start(host.address)
        build(folder, cloud.endpoint)
        yield host


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opened]:
    """Opens a host's page."""
    hosts: set[str | None] = set()
    harmless = (
        "ERR_INTERNET_DISCONNECTED",
        "ERR_CONNECTION_REFUSED",
        "ERR_CONNECTION_RESET",
        "503 (Service",
    )
    with visits(chromium, hosts, *harmless) as visit:
        yield lambda host, state, *size, **how: visit(host.address, state, *size, **how)
    assert hosts <= {"127.0.0.1", None}, "the page asks nobody but its origin and its verifier"


KEPT = """async () => {
  const wish = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const database = await wish(indexedDB.open("moa-device"));
  return wish(database.transaction("turns").objectStore("turns").getAll());
}"""


def kept(page: Any) -> list[dict[str, Any]]:
    """The turns in the page's database, the oldest first."""
    return sorted(page.evaluate(KEPT), key=lambda turn: float(turn["at"]))


def setting(page: Any, name: str, value: object) -> None:
    page.evaluate(
        "([name, value]) => { const field = document.querySelector(`#${name}`); field.value = value;"
        " field.dispatchEvent(new Event('change')); }",
        [name, str(value)],
    )


def answer(page: Any, question: str) -> str:
    """The text of an answer in a new conversation, when it is all there."""
    page.click("#new")
    page.evaluate("() => { document.querySelector('#status').textContent = ''; }")
    ask(page, question)
    complete(page)
    return str(kept(page)[-1]["state"]["text"])


PROMPT_FILE = json.loads(demo.paths().prompts.read_text(encoding="utf-8"))
QUESTIONS = PROMPT_FILE["heldout"]
PLENTY = [*QUESTIONS, *PROMPT_FILE["train"]]


def device(
    verifier: str, questions: list[str], variant: str = "", **changes: Any
) -> list[TimedAnswer]:
    """The Python device's answers; in a thread, for Playwright has this one's event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _device(verifier, questions, variant, **changes)).result()


async def _device(
    verifier: str, questions: list[str], variant: str, **changes: Any
) -> list[TimedAnswer]:
    async with EdgeClient(verifier=verifier, variant=variant, max_new_tokens=64) as client:
        if verifier:
            await client.wait_online(PATIENCE)
        return [
            await ask_python(client.conversation(), client.encode(q), **changes) for q in questions
        ]


def test_the_first_visit_is_small_and_the_second_loads_nothing(opened: Opened, alone: Host) -> None:
    page = opened(alone, "none")
    page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    packed = {path: size for path, size in alone.sent.items() if path.startswith("/packed/")}
    assert len(packed) == 4
    assert sum(packed.values()) < FIRST_VISIT - 200_000, "each came once"
    before = alone.sent.copy()
    again = opened(alone, "none", context=page.context)
    assert alone.sent - before == Counter(), "not even the service worker's program"
    policy = again.evaluate(
        "fetch('worker.js').then((found) => found.headers.get('Content-Security-Policy'))"
    )
    assert "default-src 'none'" in policy, "a static host sends no policy: the service worker does"


def test_a_damaged_file_is_noticed_and_fetched_again(
    opened: Opened, built: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "app"
    shutil.copytree(built, folder)
    file = folder / json.loads((folder / "config.json").read_text())["files"]["model"]["name"]
    content = file.read_bytes()
    damaged = bytearray(gzip.decompress(content))
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(gzip.compress(damaged))
    with hosted(folder) as host:
        page = opened(host, "broken")
        assert "is damaged" in page.get_attribute("#link", "title")
        file.write_bytes(content)
        page.reload()
        page.wait_for_selector("#link[data-state=none]")


def test_a_drafter_that_is_too_large_for_the_device_is_refused_before_it_is_loaded(
    opened: Opened, built: Path, tmp_path: Path
) -> None:
    shutil.copytree(built, tmp_path / "app")
    config = json.loads((built / "config.json").read_text())
    (tmp_path / "app" / "config.json").write_text(json.dumps({**config, "memory": 5 << 30}))
    with hosted(tmp_path / "app") as host:
        page = opened(host, "broken")
        page.wait_for_selector("text=its model takes 5.0 GB of memory")
        ask(page, STORY)
        page.wait_for_selector(".note.error >> text=with a smaller bundle")
        assert not [path for path in host.sent if "packed" in path]


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "sampled"]
)
def test_offline_from_the_start_it_writes_what_the_python_device_writes(
    opened: Opened, alone: Host, changes: dict[str, float]
) -> None:
    questions = QUESTIONS[:20]
    theirs = device("", questions, "web", **changes)
    page = opened(alone, "none")
    page.context.set_offline(True)
    for name, value in {"max_tokens": 64, **changes}.items():
        setting(page, name, value)
    ours = [answer(page, question) for question in questions]
    assert ours == [answer.text for answer in theirs]
    assert [turn["state"]["alone"]["ids"] for turn in kept(page)] == [a.ids for a in theirs]


def test_a_click_to_the_first_token_offline(opened: Opened, alone: Host) -> None:
    page = opened(alone, "none")
    page.context.set_offline(True)
    page.reload()
    page.wait_for_selector("#link[data-state=none]")
    began = time.monotonic()
    ask(page, QUESTIONS[0])
    written(page, 1)
    seconds = time.monotonic() - began
    print(f"\nfrom the click to the first token, offline: {seconds:.2f} s")
    assert seconds < 3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), (
        "beside other work: its share of the processor"
    )
    complete(page)


def test_a_page_that_is_killed_in_mid_answer_goes_on(opened: Opened, alone: Host) -> None:
    page = opened(alone, "none")
    whole = answer(page, STORY)
    for ending in ("at once", "reload", "kill"):
        page.click("#new")
        ask(page, STORY)
        if ending == "at once":
            page.wait_for_selector(".assistant")
        else:
            written(page, 12)
        if ending == "kill":
            context = page.context
            page.close(run_before_unload=False)
            page = opened(alone, "none", context=context)
            page.click("#conversations .open >> nth=0")
        else:
            page.reload()
        page.wait_for_function(
            f"() => document.querySelector('.assistant .body')?.textContent === {json.dumps(whole)}"
        )


def test_an_answer_that_ended_at_the_limit_is_continued(opened: Opened, app: Host) -> None:
    page = opened(app, "online")
    whole = answer(page, STORY)
    setting(page, "max_tokens", 12)
    beginning = answer(page, STORY)
    assert whole.startswith(beginning)
    assert len(beginning) < len(whole)
    setting(page, "max_tokens", 256)
    page.click(".assistant .more")
    page.wait_for_function(
        "(text) => document.querySelector('.assistant .body').textContent === text", arg=whole
    )


async def _generated(messages: list[dict[str, str]]) -> tuple[str, list[str]]:
    async with (
        EdgeClient(variant="web", max_new_tokens=64) as client,
        client.conversation() as conversation,
    ):
        events = [event async for event in conversation.generate(messages)]
    assert isinstance(events[-1], Done)
    return events[-1].text, [event.message for event in events if isinstance(event, Notice)]


def test_a_chat_beyond_the_context_loses_the_turns_that_it_loses_in_python(
    opened: Opened, alone: Host
) -> None:
    turn = [
        {"role": "user", "content": "Count: " + "apple, pen, " * 60},
        {"role": "assistant", "content": "120"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        *turn * 12,
        {"role": "user", "content": QUESTIONS[0]},
    ]
    with ThreadPoolExecutor(1) as thread:
        text, notices = thread.submit(asyncio.run, _generated(messages)).result()
    found = opened(alone, "none").evaluate(ANSWER, [messages, {}])
    assert (found[0], found[3]) == (text, notices)
    assert "no longer sent" in notices[0]


def test_storage_that_is_evicted_under_an_open_page_is_made_anew(
    opened: Opened, alone: Host
) -> None:
    page = opened(alone, "none")
    text = answer(page, QUESTIONS[0])
    everything = {"origin": alone.address, "storageTypes": "all"}
    page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", everything)
    assert answer(page, QUESTIONS[0]) == text
    assert len(kept(page)) == 1
    page.reload()
    page.wait_for_function(
        "(text) => document.querySelector('.assistant .body')?.textContent === text", arg=text
    )


def test_with_a_verifier_the_text_is_the_targets(opened: Opened, app: Host, cloud: Cloud) -> None:
    questions = [STORY, *QUESTIONS[:10]]
    theirs = device(cloud.url, questions)
    page = opened(app, "online")
    setting(page, "max_tokens", 64)
    cloud.forwards = 0
    for question, truth in zip(questions, theirs, strict=True):
        assert answer(page, question) == truth.text
        assert page.text_content(".assistant .note") in (
            "",
            "ended at the settings' longest answer",
        )
        assert len(truth.ids) > 1
    tokens = sum(len(truth.ids) for truth in theirs)
    print(f"\n{cloud.forwards / tokens:.2f} forwards a token, {tokens} tokens")
    assert cloud.forwards < 0.8 * tokens, "drafts are accepted"


@pytest.mark.parametrize("text", [STORY, "", "größer 🙂\n\n  x"])
def test_the_worker_counts_tokens_as_the_python_device_does(
    opened: Opened, alone: Host, text: str
) -> None:
    page = opened(alone, "none")
    counted = page.evaluate("async (text) => (await import('./stream.js')).count(text)", arg=text)
    assert counted == len(Device.load(embedded_bundle()).codec.encode(text))


def test_a_stopped_answer_says_its_length_in_tokens_and_whether_they_are_verified(
    opened: Opened, app: Host, cloud: Cloud
) -> None:
    codec = Device.load(embedded_bundle()).codec
    page = opened(app, "online")
    cloud.pause = SLOW
    ask(page, STORY)
    written(page, 12)
    page.click("#stop")
    cloud.pause = 0.0
    page.wait_for_function(
        "() => / tokens/.test(document.querySelector('.assistant .measured').textContent)"
    )
    text = page.text_content(".assistant .body")
    count = len(codec.encode(text))
    assert page.text_content(".assistant .measured").startswith(f"{count} tokens, verified")
    page.context.set_offline(True)
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    page.click("#new")
    ask(page, STORY)
    written(page, 12)
    page.click("#stop")
    page.wait_for_function(
        "() => / tokens/.test(document.querySelector('.assistant .measured').textContent)"
    )
    count = len(codec.encode(page.text_content(".assistant .body")))
    assert re.match(rf"{count} tokens(?!,)", page.text_content(".assistant .measured"))


def test_a_correction_whose_check_is_cut_short_is_told_once(
    opened: Opened, app: Host, cloud: Cloud
) -> None:
    truth = device(cloud.url, [STORY], max_new_tokens=128)[0].text
    page = opened(app, "online")
    setting(page, "max_tokens", 128)
    page.click("#cut-switch")
    page.wait_for_selector("#link[data-state=offline]")
    ask(page, STORY)
    complete(page)
    assert page.text_content(".assistant .body") != truth
    page.evaluate("""() => {
        window.notices = [];
        const place = document.querySelector("#notice");
        new MutationObserver(() => notices.push(place.textContent))
            .observe(place, { childList: true });
    }""")
    cloud.pause = 2 * SLOW
    for _ in range(2):
        page.click("#cut-switch")
        page.wait_for_function(
            "() => /is correcting|goes on with/"
            ".test(document.querySelector('.assistant .note').textContent)"
        )
        page.click("#cut-switch")
        page.wait_for_selector("#link[data-state=offline]")
    cloud.pause = 0.0
    page.click("#cut-switch")
    page.wait_for_function(
        "(text) => document.querySelector('.assistant .body').textContent === text", arg=truth
    )
    first, *others = page.evaluate("notices")
    assert first == "The verifier corrects an answer that was written offline"
    assert others.pop() == "The verifier has completed an answer that was written offline"
    assert set(others) == {"The verifier goes on with an answer"}


def test_the_verifier_s_endpoint_serves_the_app(opened: Opened, tmp_path: Path) -> None:
    with Port("127.0.0.1", 0) as port, Port("127.0.0.1", 0) as endpoint:
        number, other = port.number, endpoint.number
    build(tmp_path / "app", "/")
    origin = f"http://127.0.0.1:{other}"
    command = f"serve --port {number} --openai {other} --app {tmp_path / 'app'}".split()
    program = "from cloud_verifier.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            while "API at" not in (line := process.stdout.readline()):
                assert line
            page = opened(SimpleNamespace(address=f"{origin}/app/"), "online")
            assert answer(page, STORY)
            assert page.text_content(".assistant .note") == ""
            assert float(tile(page, "Tokens a forward")) > 1, "the server's drafts are right"
            assert tile(page, "Round trip").endswith("ms")
        finally:
            process.terminate()


ANSWER = """async ([question, changes]) => {
  const [{ chunks }, { Answer }] = await Promise.all([import("./stream.js"), import("./answer.js")]);
  const answer = new Answer(), notices = [], began = performance.now();
  let last = began;
  const messages = typeof question === "string" ? [{ role: "user", content: question }] : question;
  const body = { messages, moa: {}, max_tokens: 64, ...changes };
  for await (const chunk of chunks({ body, signal: new AbortController().signal })) {
    answer.take(chunk);
    if (chunk.choices?.[0]?.delta?.content) last = performance.now();
    if (chunk.moa?.notice) notices.push(chunk.moa.notice);
  }
  const usage = { ...answer.usage, seconds: (last - began) / 1000 };
  return [answer.text, answer.allVerified, usage, notices];
}"""


def asked(page: Any, question: str, **changes: float) -> tuple[str, bool, dict[str, Any]]:
    """Text of an answer, whether all of it is verified, and its figures; without the page's own
    elements."""
    text, verified, usage, _ = page.evaluate(ANSWER, [question, changes])
    return text, verified, usage


def test_over_each_link_the_text_is_the_targets(opened: Opened, app: Host, cloud: Cloud) -> None:
    page = opened(app, "online")
    questions = PLENTY[:PROMPTS]
    for changes in ({}, {"temperature": 0.8, "seed": 5}):
        theirs = device(cloud.url, questions, draft="server", **changes)
        for number, (question, truth) in enumerate(zip(questions, theirs, strict=True)):
            link = LINKS[number % len(LINKS)]
            cloud.use(link)
            found = asked(page, question, **changes)[:2]
            assert found == (truth.text, True), (link, changes, number)
        cloud.use("loopback")


def test_over_a_worse_link_it_is_about_as_fast_as_the_python_device(
    opened: Opened, app: Host, cloud: Cloud
) -> None:
    page = opened(app, "online")
    cloud.pause = STEP_SECONDS
    cloud.use("4g")
    questions = [STORY, *QUESTIONS[:5]]
    seconds = {"python": 0.0, "page": 0.0}
    tokens = {"python": 0, "page": 0}
    for _ in range(ROUNDS + 1):
        for answer in device(cloud.url, questions):
            tokens["python"] += len(answer.ids)
            seconds["python"] += len(answer.ids) / answer.stats["tokens_per_second"]
        for question in questions:
            usage = asked(page, question)[2]
            tokens["page"] += usage["completion_tokens"]
            seconds["page"] += usage["seconds"]
    cloud.pause = 0.0
    cloud.use("loopback")
    speeds = {name: tokens[name] / seconds[name] for name in tokens}
    print("\ntokens/s, of the page over 4g and of the Python device without a link:", speeds)
    idle = min(1.0, (os.cpu_count() or 1) / os.getloadavg()[0])
    assert speeds["page"] > 0.5 * speeds["python"] * idle


def test_cuts_reloads_and_kills_in_mid_answer_change_nothing(
    opened: Opened, app: Host, cloud: Cloud
) -> None:
    text = device(cloud.url, [STORY], max_new_tokens=128)[0].text
    page = opened(app, "online")
    setting(page, "max_tokens", 128)
    rng = random.Random(7)
    for number in range(ROUNDS):
        for ending in ("cut", "reload", "kill", "reload offline"):
            page.click("#new")
            cloud.pause = SLOW
            ask(page, STORY)
            written(page, rng.randrange(1, len(text) // 2))
            if ending in ("cut", "reload offline"):
                page.context.set_offline(True)
                page.click("#cut-switch")
                written(page, 20, ".provisional")
                if number == 0 and ending == "cut":
                    picture(page, "web-app")
            if ending == "cut":
                page.click("#cut-switch")
            elif ending == "kill":
                context = page.context
                page.close(run_before_unload=False)
                page = opened(app, "online", context=context)
                page.click("#conversations .open >> nth=0")
            else:
                page.reload()
            page.context.set_offline(False)
            cloud.pause = 0.0
            whole = "(text) => document.querySelector('.assistant .body')?.textContent === text"
            page.wait_for_function(whole, arg=text)
            page.wait_for_function("() => !document.querySelector('.provisional, .caret')")
    page.wait_for_selector("#link[data-state=online]")
    turns = kept(page)
    assert [turn["state"]["text"] for turn in turns] == [text] * 4 * ROUNDS
    assert all(turn["verified"] for turn in turns)


@pytest.mark.parametrize(("width", "height"), [(360, 740), (390, 844), (1280, 720)])
def test_sizes_and_accessibility(opened: Opened, alone: Host, width: int, height: int) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs `make clients`"
    ).Axe()
    page = opened(alone, "none", width, height)
    ask(page, STORY)
    complete(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing to scroll sideways"
    )
    picture(page, f"web-app-{width}")
    found = axe.run(page).response["violations"]
    assert [(v["id"], v["nodes"]) for v in found if v["impact"] in ("serious", "critical")] == []


STEP = """async () => {
  const [{ loadGraph }, { Drafter }] = await Promise.all([import("./bundle.js"), import("./drafter.js")]);
  const drafter = new Drafter(await loadGraph(await (await fetch("config.json")).json()));
  const ids = [1];
  let best = Infinity;
  while (ids.length < 250) {
    const before = drafter.runSeconds, steps = drafter.guess(ids, { temperature: 0 });
    let step = await steps.next();
    while (!step.done) step = await steps.next();
    best = Math.min(best, drafter.runSeconds - before);
    ids.push(step.value);
  }
  return best;
}"""


def test_a_step_is_not_much_slower_than_the_native_one(opened: Opened, alone: Host) -> None:
    drafter = Device.load(threads=1).new_drafter()
    ids = [1]
    native = 1.0
    while len(ids) < 250:
        before = drafter.run_seconds
        ids.append(run(drafter.guess(ids, SamplingSettings())))
        native = min(native, drafter.run_seconds - before)
    ours = opened(alone, "none").evaluate(STEP)
    print(f"\na step, best of {len(ids)}: {1000 * ours:.2f} ms, native {1000 * native:.2f} ms")
    assert ours < 4 * native


def _resident() -> int:
    """Bytes of the largest renderer: Chromium runs a page and its workers in one process."""
    most = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"--type=renderer" in (process / "cmdline").read_bytes():
                lines = (process / "smaps_rollup").read_text().splitlines()
                most = max(
                    most,
                    *(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")),
                )
    return most


def test_memory_stays_flat(opened: Opened, alone: Host) -> None:
    page = opened(alone, "none")
    setting(page, "max_tokens", 24)
    sizes = []
    for number in range(50):
        answer(page, QUESTIONS[number % len(QUESTIONS)])
        if number % 10 == 9:
            sizes.append(_resident())
    deadline = time.monotonic() + 30
    while (rested := _resident()) > sizes[0] and time.monotonic() < deadline:
        time.sleep(
            0.2
        )  # the browser collects garbage when it is idle, and these answers left no pause
    print(
        "\nMB after each ten answers:", [size >> 20 for size in sizes], "and at rest:", rested >> 20
    )
    assert rested < 250 << 20
    assert rested < 1.2 * sizes[0], "answers leave nothing; on a busy machine their garbage waits"
