"""The everyday hour beside a real pair, in a terminal: `edge-client chat` in tmux through ten turns
with three cuts, `/edit`, a stop with `/continue`, a long paste, a question that only the device can
answer, and a schema in a window of its own. The screen is written down five times a second.

Asserted: whatever looked verified stands in the text at the end; nothing that was under way stood
still; and that text is what the target's own endpoint, which has no drafts, answers to the same
messages.

`MOA_TARGET` and `MOA_BUNDLE` name the pair (`real_pair.py`); without them, or without tmux, it is
skipped. `MOA_TURNS=first,cut` walks only these turns, `MOA_SCREENS=DIR` keeps the screens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest

from moa.process.listening import Port
from tests.clients.real_pair import (
    BUNDLE,
    CUTS,
    MOST,
    TARGET,
    EverydayTurns,
    Link,
    Program,
    pasted,
    target,
    what_is,
)

TMUX = shutil.which("tmux")
TURNS = os.environ.get("MOA_TURNS", "")
COLUMNS = 100
ROWS = 40
LOOK = 0.2
"""Seconds between two looks."""
SURE = 3
"""Looks in which something must hold before the next step follows from it."""
LIFE = 1.3
"""Seconds within which a screen with something under way shows a change: one, and a look."""
BUSY = 1.5
"""Programs that want a core, for each core, beside which nothing can be promised in seconds."""
UNDER_WAY = re.compile(r"● |checking |correcting |reading|loading")
"""What stands below a text that somebody works on."""
WAITS = re.compile(r"checked when|not verified: ")
"""What stands there while nobody can check it."""
SHORTEST = 12
"""Letters of a piece of text from which it is asked where it comes from."""

pytestmark = [
    pytest.mark.skipif(TMUX is None, reason="needs tmux"),
    pytest.mark.skipif(not (TARGET and BUNDLE), reason="needs MOA_TARGET and MOA_BUNDLE"),
    pytest.mark.slow,
]


class Look(NamedTuple):
    """What stood on the screen at a time, with its styles as escape sequences."""

    at: float
    turn: str
    screen: str


class Terminal:
    """A window of tmux with one of our programs in it, which is looked at all the time."""

    def __init__(self, name: str, module: str, command: list[str]) -> None:
        self._server = f"moa-{os.getpid()}-{name}"
        self.turn = "start"
        self.looks: list[Look] = []
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        program = f"from {module} import main; main()"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        run = [sys.executable, "-c", program, *command]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, *run)
        self._tmux("set", "remain-on-exit", "on")
        self._tmux("set", "history-limit", "20000")

    def __enter__(self) -> Terminal:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        self._tmux("kill-server")

    def _tmux(self, *command: str, given: str | None = None) -> str:
        assert TMUX is not None
        done = subprocess.run(
            [TMUX, "-L", self._server, *command],
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
            input=given,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            screen = self._tmux("capture-pane", "-p", "-e")
            self.looks.append(Look(time.monotonic(), self.turn, screen))

    def type(self, line: str) -> None:
        """Type a line, and Enter."""
        self._tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def paste(self, text: str) -> None:
        """As a terminal does that tells its program what is pasted."""
        self._tmux("load-buffer", "-", given=text)
        self._tmux("paste-buffer", "-p")

    def rows(self) -> list[str]:
        """The screen's rows, without styles."""
        return self._tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def history(self) -> str:
        """All that stands in the window, and what has left it at the top."""
        return self._tmux("capture-pane", "-p", "-S", "-", "-e")

    def until(self, holds: Callable[[list[str]], bool]) -> None:
        """Wait until this holds of the rows, in some looks one after the other: while something is
        drawn a part of it is not there."""
        deadline = time.monotonic() + MOST
        held = 0
        while held < SURE:
            rows = self.rows()
            held = held + 1 if holds(rows) else 0
            assert time.monotonic() < deadline, "\n".join(rows)
            time.sleep(LOOK / 2)


def is_asked(rows: list[str]) -> bool:
    """Whether the program waits for a line."""
    return _below_prompt(rows) is not None


def is_settled(rows: list[str]) -> bool:
    """Whether it waits for a line, and nothing is left to check."""
    return _below_prompt(rows) == ""


def _below_prompt(rows: list[str]) -> str | None:
    """What stands below an empty prompt; None where there is no empty prompt."""
    prompts = [number for number, row in enumerate(rows) if row == ">" or row.startswith("> ")]
    if not prompts or rows[prompts[-1]].strip() != ">":
        return None
    return " ".join(rows[prompts[-1] + 1 :]).strip()


def answered(characters: int) -> Callable[[list[str]], bool]:
    """Whether the answer under way has so many letters on the screen."""

    def holds(rows: list[str]) -> bool:
        asked = max((number for number, row in enumerate(rows) if row.startswith("> ")), default=0)
        answer = [row for row in rows[asked + 1 :] if not row.startswith("● ")]
        return len(letters(" ".join(answer))) >= characters

    return holds


def letters(text: str) -> str:
    """A text without the marks and blanks that drawing changes."""
    return re.sub(r"[\W_]", "", text)


# ---- what looked verified

STYLE = re.compile(r"\x1b\[([\d;]*)m|\x1b[()][A-Z0-9]|[\x0e\x0f]")


def styled(
    row: str, style: frozenset[str]
) -> tuple[list[tuple[str, frozenset[str]]], frozenset[str]]:
    """The characters of a row with their styles, and the style at its end."""
    found: list[tuple[str, frozenset[str]]] = []
    end = 0
    for escape in [*STYLE.finditer(row), None]:
        found += [(one, style) for one in row[end : escape.start() if escape else len(row)]]
        if escape is None:
            break
        end = escape.end()
        for code in (escape[1] or "0").split(";") if escape[1] is not None else ():
            style = frozenset() if code in ("0", "") else style | {code}
            if code == "39":
                style -= {str(number) for number in range(30, 38)}
            if code in ("22", "23"):
                style -= {"1", "2"} if code == "22" else {"3"}
    return found, style


PLAIN = frozenset({"1", "22", "23", "36", "39", "49"})
"""Styles of verified text: none, bold, and code's colour."""


def verified_pieces(screen: str) -> Iterator[str]:
    """Letters in the style of verified text, each piece up to where something else stands. Rows of
    the user and of the status are none."""
    piece: list[str] = []
    style: frozenset[str] = frozenset()
    for row in screen.split("\n"):
        cells, style = styled(row, style)
        plain = "".join(one for one, _ in cells)
        own = not plain.startswith(("● ", "> ", ">"))
        shown = [(one, set(how) <= PLAIN and own) for one, how in cells if letters(one)]
        for one, is_verified in shown:
            if is_verified:
                piece.append(one)
            elif piece:
                yield "".join(piece)
                piece.clear()
    if piece:
        yield "".join(piece)


def check_truth(looks: Iterable[Look], texts: Iterable[str]) -> list[str]:
    """Pieces that looked verified and stand in none of these texts."""
    known = [letters(re.sub(r"^\s*(```|~~~).*$", "", text, flags=re.M)) for text in texts]
    found: dict[str, str] = {}
    for look in looks:
        if look.turn == "start":
            continue  # nothing was asked yet
        for piece in verified_pieces(look.screen):
            if len(piece) >= SHORTEST and not any(piece in text for text in known):
                found.setdefault(piece, f"{look.turn}: {piece[:300]}")
    return list(found.values())


def stills(looks: Iterable[Look]) -> list[str]:
    """Where something was under way and nothing on the screen changed."""
    found: list[str] = []
    since: Look | None = None
    last = 0.0
    for look in looks:
        if since is not None and look.screen == since.screen:
            last = look.at
            continue
        if since is not None and last - since.at > LIFE and is_under_way(since.screen):
            shown = STYLE.sub("", since.screen).rstrip().rpartition("\n")[2]
            found.append(f"{since.turn}: {last - since.at:.1f} s at {shown!r}")
        since, last = look, look.at
    return found


def is_under_way(screen: str) -> bool:
    """Whether the program works, by what it shows: no prompt is open, or something is checked."""
    rows = STYLE.sub("", screen).rstrip("\n").split("\n")
    below = _below_prompt([row.rstrip() for row in rows])
    if below is None:
        return True
    return bool(UNDER_WAY.search(below)) and not WAITS.search(below)


# ---- the hour


@dataclass
class Hour(EverydayTurns):
    """The chat, what is around it, and what was answered."""

    terminal: Terminal
    verifier: Program
    link: Link
    folder: Path
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    """The conversation after each turn."""
    steps: list[str] = field(default_factory=list)

    def begin(self, line: str, name: str) -> None:
        self.terminal.turn = name
        self.terminal.type(line)

    def keep(self, name: str) -> None:
        if folder := os.environ.get("MOA_SCREENS"):
            (Path(folder) / f"{name}.txt").write_text("\n".join(self.terminal.rows()))

    def settle(self, name: str) -> None:
        """Wait until all is checked, and keep what the conversation is then."""
        self.terminal.until(is_settled)
        self.keep(f"{name}-end")
        file = self.folder / f"said-{name}.json"
        self.terminal.type(f"/save {file}")
        self.terminal.until(lambda rows: is_settled(rows) and file.exists())
        self.asked.append(json.loads(file.read_text())["messages"])

    def turn(self, line: str, name: str, act: Callable[[], None] = lambda: None) -> None:
        began = time.monotonic()
        self.begin(line, name)
        self.terminal.until(lambda rows: not is_asked(rows))
        act()
        self.settle(name)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)

    def cut(self, seconds: float, how: str, name: str) -> None:
        self.terminal.until(answered(20))
        self.link.does(how)
        time.sleep(seconds)  # what is asked is what a cut of so many seconds does
        self.keep(f"{name}-away")
        self.link.does("restore")

    # ---- the turns

    def edited(self) -> None:
        self.turn(f"/edit {what_is('a linked list')}", "edited")

    def stopped(self) -> None:
        self.begin(what_is("a binary tree"), "stopped")
        self.terminal.until(answered(20))
        self.terminal.press("C-c")
        self.terminal.until(is_asked)
        self.keep("stopped")
        self.turn("/continue", "continued")

    def killed(self) -> None:
        """The verifier dies in mid-answer, and there is another one when the link is back. Meanwhile
        something is asked that only the device can answer."""
        began = time.monotonic()
        self.begin(what_is("a mutex"), "killed")
        self.terminal.until(answered(20))
        self.link.does("go_down")
        back = time.monotonic() + CUTS[2]
        self.verifier.kill()
        self.verifier.start()
        self.terminal.until(is_asked)
        self.keep("killed-away")
        self.begin("What is the capital of France?", "offline")
        self.terminal.until(lambda rows: not is_asked(rows))
        self.terminal.until(is_asked)
        self.keep("offline")
        time.sleep(max(0.0, back - time.monotonic()))  # as in `cut`
        self.verifier.wait()
        self.link.does("restore")
        self.settle("killed-checked")
        print(f"killed: {time.monotonic() - began:.1f} s", flush=True)

    def undone(self) -> None:
        """Taken back, and asked again."""
        self.begin("/undo", "undone")
        self.terminal.until(lambda rows: is_settled(rows) and "taken back" in "".join(rows))
        self.turn("What is the capital of Italy?", "undone")

    def paste(self) -> None:
        self.terminal.turn = "pasted"
        self.terminal.paste(pasted())
        time.sleep(1)  # a terminal tells its program nothing of the end of a paste
        self.keep("paste")
        self.turn("", "pasted")

    def last(self) -> None:
        self.turn("What day is it three days after Monday?", "last")


def walk(hour: Hour) -> None:
    """The turns, or those that are named."""
    turns: tuple[Callable[[], None], ...] = (
        hour.first,
        hour.code,
        hour.silent,
        hour.edited,
        hour.stopped,
        hour.killed,
        hour.undone,
        hour.paste,
        hour.last,
    )
    for turn in turns:
        if not TURNS or turn.__name__ in TURNS.split(","):
            turn()


def own_answer(address: str, messages: list[dict[str, str]]) -> str:
    """What the target answers by itself."""
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 4096}
    reply = httpx.post(
        f"{address}/v1/chat/completions", json=body, timeout=MOST, trust_env=False
    ).raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"])


def differing(address: str, conversations: Iterable[list[dict[str, str]]]) -> list[str]:
    """The answers that are not the target's own."""
    done: set[str] = set()
    found: list[str] = []
    for messages in conversations:
        for number, message in enumerate(messages):
            key = json.dumps(messages[: number + 1])
            if message["role"] != "assistant" or key in done:
                continue
            done.add(key)
            own = own_answer(address, messages[:number])
            if message != {"role": "assistant", "content": own}:
                found.append(f"{messages[number - 1]['content'][:60]!r}: {message} is not {own!r}")
    print(f"{len(done)} answers compared with the target's own, {len(found)} differ", flush=True)
    return found


@contextlib.contextmanager
def chat(name: str, link: Link, *flags: str) -> Iterator[Terminal]:
    """`edge-client chat` beside that link, when it is online."""
    command = ["chat", "--bundle", BUNDLE, "--verifier", f"ws://127.0.0.1:{link.port}"]
    with Terminal(name, "edge_client.cli", [*command, "--no-history", *flags]) as terminal:
        terminal.until(is_settled)
        yield terminal


@pytest.mark.timeout(5400)
def test_an_everyday_hour_in_a_terminal(tmp_path: Path) -> None:
    with Port("127.0.0.1", 0) as free:
        own = free.number
    with target("--openai", str(own)) as (verifier, link):
        with chat("hour", link) as terminal:
            hour = Hour(terminal, verifier, link, tmp_path)
            try:
                walk(hour)
            finally:
                history = terminal.history()
                if folder := os.environ.get("MOA_SCREENS"):
                    (Path(folder) / "history.txt").write_text(history)
                    kept = [look._asdict() for look in terminal.looks]
                    (Path(folder) / "looks.json").write_text(json.dumps(kept))
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        differ = differing(f"http://127.0.0.1:{own}", hour.asked)
    texts = ["\n".join(one["content"] for one in messages) for messages in hour.asked]
    false = check_truth(terminal.looks, texts)
    still = stills(terminal.looks)
    print(f"{len(terminal.looks)} looks, load {load:.1f} a core")
    print(f"still: {len(still)}", *still, sep="\n  ")
    print(f"false: {len(false)}", *false, sep="\n  ")
    assert not false
    assert not differ
    assert not still or load > BUSY


@pytest.mark.timeout(1800)
def test_a_schema_through_a_cut(tmp_path: Path) -> None:
    """Every answer matches it, also what the device writes alone."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "uses": {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 4},
            "year": {"type": "integer"},
        },
        "required": ["name", "uses", "year"],
        "additionalProperties": False,
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    with target() as (verifier, link), chat("schema", link, "--json-schema", str(file)) as terminal:
        hour = Hour(terminal, verifier, link, tmp_path)
        question = "Describe the programming language Python."
        hour.turn(question, "schema", lambda: hour.cut(CUTS[0], "go_down", "schema"))
        still = stills(terminal.looks)
    answer = json.loads(hour.asked[-1][-1]["content"])
    assert set(answer) == set(schema["required"])
    assert "verified_characters" not in hour.asked[-1][-1]
    print(f"still: {len(still)}", *still, sep="\n  ")
    assert not check_truth(terminal.looks, [hour.asked[-1][-1]["content"]])
