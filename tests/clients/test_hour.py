"""An everyday hour on the page in Chromium, beside a target that is as slow as a real one: cuts,
edits, stops, a long text, a reload. Whatever is on the screen is written down five times a second,
and must have been true, and alive.

`MOA_FORWARD=250ms` is how long a forward takes, `MOA_WIDTH=390` how wide the page is,
`MOA_CUTS=5,30` how many seconds its cuts last, and `MOA_PICTURES=DIR` keeps a picture of each turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa.process.listening import Port
from tests.clients.conftest import CHROMIUM, PATIENCE, visits
from tests.clients.real_pair import Link

pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
from tests.clients.test_browser import STORY, ask, picture
from tests.clients.test_web_app import NPM, build

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.slow,
]
FORWARD = os.environ.get("MOA_FORWARD", "100ms")
WIDTH = int(os.environ.get("MOA_WIDTH", "1280"))
CUTS = [float(seconds) for seconds in os.environ.get("MOA_CUTS", "2,5").split(",")]
LIFE = 1.2
"""Seconds within which a page with an answer under way shows something new, on an idle machine: one,
and the pause between two looks."""
LONG = "Here are my notes:\n" + "apple, pen, lamp, " * 40 + "\nWhat is 17 + 25?"
WATCH = """(latest = 1) => {
  const seen = globalThis.seen = [];
  const text = (box) => {
    const copy = box.querySelector(".body").cloneNode(true);
    for (const gone of copy.querySelectorAll(".retracted, .code-bar")) gone.remove();
    const whole = copy.textContent;
    for (const open of copy.querySelectorAll(".provisional")) open.remove();
    return [whole, copy.textContent];
  };
  const look = (box) => {
    const asked = box.previousElementSibling?.querySelector(".body");
    if (!asked) return;
    const [whole, settled] = text(box);
    seen.push({
      at: performance.now() / 1000, asked: asked.textContent.slice(0, 200), whole, settled,
      busy: box.getAttribute("aria-busy") === "true", note: box.querySelector(".note").textContent,
      who: box.querySelector(".who").textContent, link: document.querySelector("#link").dataset.state,
      drawn: box.querySelector(".body").innerHTML.length,
      notice: document.querySelector("#notice:not([hidden])")?.textContent ?? "",
    });
  };
  setInterval(() => {
    [...document.querySelectorAll(".message.assistant")].slice(-latest).forEach(look);
  }, 200);
}"""
"""Writes down what is on the screen, of so many of the latest answers."""

STOP = """() => {
  const text = [...document.querySelectorAll(".message.assistant .body")].at(-1)?.textContent ?? "";
  if (text.length < 20) return false;
  document.querySelector("#stop").click();
  return true;
}"""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A slow verifier with its endpoint, which serves the app."""
    with Port("127.0.0.1", 0) as port, Port("127.0.0.1", 0) as endpoint:
        numbers = port.number, endpoint.number
    command = f"serve --port {numbers[0]} --openai {numbers[1]} --emulate {FORWARD} --app {folder}"
    program = "from cloud_verifier.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *command.split()], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            while "API at" not in (line := process.stdout.readline()):
                assert line
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield numbers[1]
        finally:
            process.terminate()


def settled(page: Any) -> str:
    """The last answer, when nothing of it is open any more."""
    page.wait_for_function(
        """() => {
          const box = [...document.querySelectorAll(".message.assistant")].at(-1);
          return box && box.getAttribute("aria-busy") !== "true" && box.querySelector(".body").textContent
            && !document.querySelector(".provisional, .retracted") && !box.querySelector(".note").textContent;
        }"""
    )
    return str(page.locator(".message.assistant .body").last.text_content())


def begun(page: Any, characters: int) -> None:
    page.wait_for_function(
        "(least) => ([...document.querySelectorAll('.message.assistant .body')].at(-1)?.textContent ?? '')"
        ".length >= least",
        arg=characters,
    )


def asked_by_programs(address: str) -> None:
    """A tool call and a schema, through the same endpoint, while the page is open."""
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    body = {"messages": question, "tools": [tool], "tool_choice": "required"}
    with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
        reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        call = reply["message"]["tool_calls"][0]["function"]
        assert set(json.loads(call["arguments"])) == {"a", "b"}
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
        body = {"messages": question, "response_format": form}
        reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert "sum" in json.loads(reply["message"]["content"])


def check(seen: list[dict[str, Any]], final: dict[str, str]) -> None:
    """What was on the screen: all that was shown as verified is in the end's text, unverified text
    was marked or said to be, and nothing stood still."""
    idle = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    changed = None
    at = 0.0
    for shot in seen:
        truth = final.get(shot["asked"])
        if truth is not None:
            assert truth.startswith(shot["settled"]), shot
        if shot["whole"] != shot["settled"] and not shot["busy"]:
            assert "this device" in shot["note"] or "checking" in shot["note"], shot
            assert "this device" in shot["who"].lower() or shot["note"], shot
        assert "at work" not in shot["note"] or shot["link"] == "online", shot
        now = (shot["asked"], shot["whole"], shot["note"])
        if now != changed or not shot["busy"]:
            changed = now
            at = shot["at"]
        assert shot["at"] - at < LIFE * idle, shot


@pytest.mark.skipif(not NPM, reason="needs MOA_NPM: the packages of npm")
@pytest.mark.timeout(1800)
def test_an_everyday_hour(chromium: Any, tmp_path: Path) -> None:
    build(tmp_path / "app", "/")
    hosts: set[str | None] = set()
    harmless = ("ERR_", "Failed to load resource")
    with (
        serving(tmp_path / "app") as port,
        Link(port) as link,
        visits(chromium, hosts, *harmless) as visit,
    ):
        page = visit(f"http://127.0.0.1:{link.port}/app/", "online", WIDTH, 844)
        page.evaluate(WATCH)
        final: dict[str, str] = {}
        seen: list[dict[str, Any]] = []

        def turn(question: str, name: str, act: Callable[[], None] = lambda: None) -> None:
            began = time.monotonic()
            ask(page, question)
            act()
            final[question] = settled(page)
            picture(page, f"hour-{WIDTH}-{name}")
            print(f"{name}: {time.monotonic() - began:.1f} s, {len(final[question])} characters")

        def cut(seconds: float, how: str, name: str) -> None:
            begun(page, 20)
            link.does(how)
            page.wait_for_selector(".provisional")
            time.sleep(seconds / 2)
            picture(page, f"hour-{WIDTH}-{name}-away")
            time.sleep(seconds / 2)
            link.does("restore")

        turn("What can you do?", "1-first")
        turn(STORY, "2-cut", lambda: cut(CUTS[0], "go_down", "2-cut"))
        longer = STORY.replace("Ben", "Ada")
        turn(longer, "3-silent", lambda: cut(CUTS[-1], "go_silent", "3-silent"))
        asked_by_programs(f"http://127.0.0.1:{port}")
        page.locator(".message.user").last.get_by_role("button", name="Edit").click()
        edited = STORY.replace("Ben", "Tom")
        page.fill("textarea.edit", edited)
        page.keyboard.press("Enter")
        page.wait_for_function(
            "(text) => [...document.querySelectorAll('.message.user .body')].at(-1).textContent === text",
            arg=edited,
        )
        final[edited] = settled(page)
        picture(page, f"hour-{WIDTH}-4-edited")

        stopped = STORY.replace("Ben", "Eve")
        ask(page, stopped)
        page.wait_for_function(STOP)
        page.locator(".message.assistant .more").last.wait_for()
        picture(page, f"hour-{WIDTH}-5-stopped")
        page.locator(".message.assistant .more").last.click()
        final[stopped] = settled(page)
        turn(LONG, "6-long")
        # It answers in Markdown, whose marks are text until they are complete; and once more, sampled.
        del final[LONG]
        page.locator(".message.assistant").last.get_by_role("button", name="Again").click()
        settled(page)
        picture(page, f"hour-{WIDTH}-7-again")

        link.does("go_down")
        page.wait_for_selector("#link[data-state=offline]")
        away = "What is 31 + 11?"
        ask(page, away)
        page.wait_for_function("() => document.querySelector('#stop').hidden")
        picture(page, f"hour-{WIDTH}-8-asked-offline")
        link.does("restore")
        final[away] = settled(page)
        picture(page, f"hour-{WIDTH}-8-checked")
        seen += page.evaluate("seen.splice(0)")

        ask(page, STORY.replace("Ben", "Sam"))
        begun(page, 20)
        page.reload()
        page.evaluate(WATCH)
        final[STORY.replace("Ben", "Sam")] = settled(page)
        turn("What day is it three days after Monday?", "10-last")
        seen += page.evaluate("seen.splice(0)")
        if folder := os.environ.get("MOA_PICTURES"):
            (Path(folder) / f"hour-{WIDTH}.json").write_text(json.dumps(seen))
        check(seen, final)
