"""The everyday hour beside a real pair, on the chat page of the device's own endpoint: ten turns
with three cuts, edit and resend, a long paste, a call and a schema beside it, stop and continue, a
reload. What is on the screen is written down five times a second, as in `test_hour.py`.

`MOA_TARGET=/path/target.gguf MOA_BUNDLE=/path/bundle` name the pair; without them it is skipped.
`MOA_WIDTH=390` is how wide the page is, `MOA_CUTS=5,30,120` how many seconds its cuts last, and
`MOA_PICTURES=DIR` keeps pictures of each turn. `MOA_TURNS=first,cut` walks only these turns, and
`pytest -s` shows what was seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from moa.process.listening import Port
from tests.clients.conftest import CHROMIUM, visits
from tests.clients.real_pair import (
    BUNDLE,
    CUTS,
    MOST,
    TARGET,
    EverydayTurns,
    Link,
    Program,
    pasted,
    running,
    target,
    what_is,
)

pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
from tests.clients.test_browser import ask, picture
from tests.clients.test_hour import LIFE, STOP, WATCH, WIDTH, asked_by_programs, begun

TURNS = os.environ.get("MOA_TURNS", "")
LOOK = 8.0
"""Seconds between two pictures of an answer that is under way."""
BUSY = 1.5
"""Programs that want a core, for each core, beside which nothing can be promised in seconds."""
LATEST = 3
"""Answers on the screen that are written down: those before the latest may be checked meanwhile."""
NOTES = (
    r"\d+ characters not verified yet",
    r"reading the prompt, \d+ of \d+ tokens",
    r"no word for [\d.]+ s",
    r"the verifier is at work, [\d.]+ s",
    r"checking, \d+ of \d+ characters",
    r"the verifier is correcting this answer",
    r"the verifier goes on with this answer",
    r"written by this device alone: (waiting for the verifier's check|not checked)",
    r"the last \d+ characters were written by this device alone: "
    r"(waiting for the verifier's check|not checked)",
    r"its end was not verified",
    r"nothing is written yet: asked again when the verifier is back",
    r"asked again: an answer before it was corrected",
    r"an answer before it was corrected: (waiting to be|not) asked again",
    r"stopped",
)
"""All that may stand below an answer of this hour: none of it is an error, or cut."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (TARGET and BUNDLE), reason="needs MOA_TARGET and MOA_BUNDLE"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.slow,
]


@contextlib.contextmanager
def pair() -> Iterator[tuple[Program, Link, str]]:
    """The target's verifier, the link to it, and the address of the device's endpoint."""
    with Port("127.0.0.1", 0) as endpoint:
        number = endpoint.number
    with target() as (verifier, link):
        device = ["serve", "--bundle", BUNDLE, "--verifier", f"ws://127.0.0.1:{link.port}"]
        device += ["--port", str(number)]
        with running(Program("edge_client.cli", device, "chat page and API at")):
            yield verifier, link, f"http://127.0.0.1:{number}"


@dataclass
class Hour(EverydayTurns):
    """The page, what is around it, and what was seen."""

    page: Any
    verifier: Program
    link: Link
    address: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    began: dict[str, str] = field(default_factory=dict)
    """The turn's name, by its question."""

    def ask(self, question: str, name: str) -> None:
        self.began[question[:200]] = name
        ask(self.page, question)

    def picture(self, name: str) -> None:
        picture(self.page, f"real-{WIDTH}-{name}")
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name

    def watch(self) -> None:
        self.page.evaluate(WATCH, LATEST)

    def take(self) -> None:
        """What was seen so far, before the page goes."""
        self.seen += self.page.evaluate("seen.splice(0)")

    def until(self, over: str, name: str) -> None:
        """Wait until this holds on the page, with pictures of the time until then."""
        deadline = time.monotonic() + MOST
        due = time.monotonic()
        for number in range(10_000):
            due += LOOK
            while time.monotonic() < due:
                if self.page.evaluate(over):
                    return
                self.page.wait_for_timeout(200)
            assert time.monotonic() < deadline, name
            self.picture(f"{name}-{number}")

    def settled(self, name: str) -> None:
        """Wait until nothing on the page is open any more."""
        self.until(SETTLED, name)
        self.picture(f"{name}-end")

    def turn(self, question: str, name: str, act: Callable[[], None] = lambda: None) -> None:
        began = time.monotonic()
        self.ask(question, name)
        act()
        self.settled(name)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    def cut(self, seconds: float, how: str, name: str) -> None:
        begun(self.page, 20)
        self.link.does(how)
        self.page.wait_for_timeout(1000 * seconds / 2)
        self.picture(f"{name}-away")
        self.page.wait_for_timeout(1000 * seconds / 2)
        self.picture(f"{name}-away-last")
        self.link.does("restore")

    # ---- the turns

    def edited(self) -> None:
        """The last question once more, with another thing in it."""
        page = self.page
        page.locator(".message.user").last.get_by_role("button", name="Edit").click()
        self.began[what_is("a linked list")] = "edited"
        page.fill("textarea.edit", what_is("a linked list"))
        page.keyboard.press("Enter")
        self.settled("edited")

    def stopped(self) -> None:
        self.ask(what_is("a binary tree"), "stopped")
        self.page.wait_for_function(STOP)
        self.page.locator(".message.assistant .more").last.wait_for()
        self.picture("stopped")
        self.page.locator(".message.assistant .more").last.click()
        self.settled("continued")

    def paste(self) -> None:
        self.began[pasted()[:200]] = "pasted"
        self.page.click("#prompt")
        self.page.keyboard.insert_text(pasted())
        self.picture("paste")
        self.page.keyboard.press("Enter")
        self.settled("pasted")

    def programs(self) -> None:
        """A call and a schema, which programs ask for at the same endpoint while the page answers."""
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(asked_by_programs, self.address)
            self.turn("Name three colours, in one short sentence.", "programs")
            asked.result()

    def killed(self) -> None:
        """The verifier dies in mid-answer, and there is another one when the link is back. Meanwhile
        something is asked that only the device can answer."""
        began = time.monotonic()
        self.ask(what_is("a mutex"), "killed")
        begun(self.page, 20)
        self.link.does("go_down")
        back = time.monotonic() + CUTS[2]
        self.verifier.kill()
        self.verifier.start()
        complete = "document.querySelector('#stop').hidden"
        self.until(complete, "killed-away")
        self.picture("killed-away-end")
        self.ask("What is the capital of France?", "offline")
        self.until(complete, "offline")
        self.picture("offline-end")
        self.page.wait_for_timeout(max(0.0, 1000 * (back - time.monotonic())))
        self.verifier.wait()
        self.link.does("restore")
        self.settled("killed-checked")
        print(f"killed: {time.monotonic() - began:.1f} s", flush=True)

    def reloaded(self) -> None:
        self.ask(what_is("a queue"), "reloaded")
        begun(self.page, 20)
        self.take()
        self.page.reload()
        self.watch()
        self.settled("reloaded")

    def last(self) -> None:
        self.turn("What day is it three days after Monday?", "last")


SETTLED = """(() => {
  const box = [...document.querySelectorAll(".message.assistant")].at(-1);
  return box && document.querySelector("#stop").hidden && box.querySelector(".body").textContent
    && !document.querySelector(".provisional, .retracted, [aria-busy=true]")
    && ![...document.querySelectorAll(".note")].some((note) => note.textContent);
})()"""

DRAWINGS = """async () => {
  // Each beginning of each answer, as the page draws it: Markdown's marks are text until they are
  // complete.
  const { markdown } = await import("/render.js");
  const { Table } = await import("/store.js");
  const textOf = (body) => {
    const box = document.createElement("div");
    box.append(body);
    for (const open of box.querySelectorAll(".provisional")) open.remove();
    return box.textContent;
  };
  const drawings = {};
  for (const { nodes } of await new Table("moa-edge", "conversations").all()) {
    for (const { role, text, parent } of Object.values(nodes)) {
      if (role !== "assistant") continue;
      const drawn = new Set();
      for (let end = 0; end <= text.length; end++) {
        drawn.add(textOf(markdown(text.slice(0, end), "")));
        drawn.add(textOf(markdown(text.slice(0, end), text.slice(end))));
      }
      drawings[nodes[parent].text.slice(0, 200)] = [...drawn];
    }
  }
  return drawings;
}"""


def letters(text: str) -> str:
    """A text without the marks that become Markdown with what is behind them."""
    return re.sub(r"[\W_]", "", text)


def check_truth(seen: Iterable[dict[str, Any]], drawings: dict[str, list[str]]) -> None:
    """All that stood as verified began the final text; what did not was marked, and said to be this
    device's; the notes were true of the text that they stood beside."""
    whole = {question: set(drawn) for question, drawn in drawings.items()}
    bare = {question: set(map(letters, drawn)) for question, drawn in drawings.items()}
    for shot in seen:
        settled = shot["settled"]
        if shot["asked"] in whole and settled not in whole[shot["asked"]]:
            assert letters(settled) in bare[shot["asked"]], shot
        check_notes(shot)


def check_notes(shot: dict[str, Any]) -> None:
    """What stands above and below an answer is true of its text."""
    note = shot["note"]
    unverified = len(shot["whole"]) - len(shot["settled"])
    for part in filter(None, note.split("; ")):
        assert any(re.fullmatch(known, part) for known in NOTES), shot
    if unverified:
        assert note, shot
        assert "this device" in shot["who"].lower() or "asked again" in note, shot
    if said := re.search(r"(\d+) characters (?:not verified|were written)", note):
        assert unverified <= int(said[1]), shot
    if said := re.search(r"(\d+) of (\d+) (?:tokens|characters)", note):
        assert int(said[1]) <= int(said[2]), shot
    if shot["busy"] and unverified:
        assert re.search(r"not verified yet|asked again|correcting|goes on", note), shot
    if "at work" in note:
        assert shot["link"] == "online", shot
    if "written by this device alone" in note and "the last" not in note:
        assert not shot["settled"], shot


def stills(seen: Iterable[dict[str, Any]], names: dict[str, str]) -> list[str]:
    """Where nothing of an answer under way changed for longer than a second, by turn."""
    found: list[str] = []
    by_question = sorted(seen, key=lambda shot: shot["asked"])
    for question, shots in groupby(by_question, key=lambda shot: shot["asked"]):
        before: dict[str, Any] = {}
        same = ("whole", "settled", "note", "busy", "drawn")
        for shot in shots:
            if before and all(before[name] == shot[name] for name in same):
                last = shot["at"]
                continue
            if before and before["busy"] and last - before["at"] > LIFE:
                turn = names.get(question, question)
                found.append(f"{turn}: {last - before['at']:.1f} s at {before['note']!r}")
            before, last = shot, shot["at"]
    return found


def walk(hour: Hour) -> dict[str, list[str]]:
    """The turns, or those that are named; what the page drew of each answer on its way to its final
    text."""
    turns: tuple[Callable[[], None], ...] = (
        hour.first,
        hour.code,
        hour.silent,
        hour.edited,
        hour.stopped,
        hour.programs,
        hour.killed,
        hour.paste,
        hour.reloaded,
        hour.last,
    )
    drawings: dict[str, list[str]] = {}
    try:
        for turn in turns:
            if not TURNS or turn.__name__ in TURNS.split(","):
                turn()
        drawings = hour.page.evaluate(DRAWINGS)
    finally:
        hour.take()
        if folder := os.environ.get("MOA_PICTURES"):
            kept = json.dumps({"seen": hour.seen, "drawings": drawings})
            (Path(folder) / f"real-{WIDTH}.json").write_text(kept)
    return drawings


@pytest.mark.timeout(5400)
def test_an_everyday_hour_of_a_real_pair(chromium: Any) -> None:
    hosts: set[str | None] = set()
    with pair() as (verifier, link, address), visits(chromium, hosts, "ERR_") as visit:
        page = visit(address, "online", WIDTH, 844)
        page.set_default_timeout(1000 * MOST)
        hour = Hour(page, verifier, link, address)
        hour.watch()
        drawings = walk(hour)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    still = stills(hour.seen, hour.began)
    print(f"{len(hour.seen)} looks, load {load:.1f} a core")
    print(f"still for more than a second: {len(still)}", *still, sep="\n  ")
    for words in dict.fromkeys(shot["notice"] for shot in hour.seen):
        print(f"said: {words}")
    check_truth(hour.seen, drawings)
    assert not still or load > BUSY
