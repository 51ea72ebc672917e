"""The screen: control sequences are escaped, no text is shown twice or lost."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.segment import ControlType
from rich.text import Text

from edge_client.events import Done, Event, Link, Notice, Prompt, Token
from edge_client.screen.live import LiveView, Region
from edge_client.screen.terminal import PipeView
from edge_client.screen.views import make_console

STATS = {
    "tokens": 1,
    "first_token_seconds": 0.1,
    "last_token_seconds": 0.2,
    "calls": 1,
    "tokens_per_round": None,
    "retracted": 0,
}
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\u202ed"


def shown(events: Sequence[Event]) -> str:
    """What a terminal is sent, without rich's own control sequences."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, record=True, color_system=None)
    with LiveView(console) as view:
        for event in events:
            view.take(event)
    assert "\x1b]0" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    return console.export_text()


def test_what_a_verifier_hides_in_text_is_seen_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = [
        Prompt(ids=[1]),
        Link(state="offline", detail=HOSTILE),
        Notice(message=HOSTILE),
        Token(position=1, id=5, text=HOSTILE, status="verified"),
        Token(position=2, id=5, text=HOSTILE + "\n", status="provisional"),
        Done(reason="length", verified=False, text=HOSTILE * 2 + "\n" + HOSTILE, stats=STATS),
    ]
    assert "a\\x1b]0;title\\x07b\\x1b[2Jc\\u202ed" in shown(events)
    with PipeView() as view:
        for event in events:
            view.take(event)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err
    assert captured.out == HOSTILE * 2 + "\n" + HOSTILE + "\n", "a file gets the text as it is"


def test_a_dumb_terminal_obeys_nothing_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with PipeView() as view:
        view.take(Prompt(ids=[1]))
        view.take(Token(position=1, id=5, text=HOSTILE, status="verified"))
    assert "\x1b" not in capsys.readouterr().out


def test_what_was_held_back_is_shown_in_the_end() -> None:
    events: list[Event] = [
        Prompt(ids=[1]),
        Token(position=1, id=5, text="one", status="verified"),
        Token(position=2, id=6, text="", status="verified"),
        Done(reason="length", verified=True, text="one\nTh", stats=STATS),
    ]
    assert "one\nTh\n" in shown(events)


@pytest.mark.parametrize(("before", "after", "rows"), [(80, 80, 2), (80, 40, 3), (80, 20, 5), (80, 200, 2)])
def test_a_narrowed_window_is_erased_whole(before: int, after: int, rows: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=before)
    region = Region(console)
    region.start()
    region.update(Text("x" * 70 + "\nstatus"), refresh=True)
    console.width = after
    control = region._live_render.position_cursor()
    region.stop()
    ups = [code for code in control.segment.control or () if code[0] is ControlType.CURSOR_UP]
    assert len(ups) == rows - 1


def test_a_line_in_a_pipe_stays_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("word " * 60 + "[end] :smile:")
    assert capsys.readouterr().out == "word " * 60 + "[end] :smile:\n"


def test_why_the_verifier_was_not_there_stays_on_the_screen() -> None:
    events: list[Event] = [
        Prompt(ids=[1]),
        Link(state="offline", detail="cannot reach ws://x"),
        Link(state="offline", detail="cannot reach ws://x"),
        Token(position=1, id=5, text="one", status="provisional"),
        Done(reason="length", verified=False, text="one", stats=STATS),
    ]
    assert shown(events).count("offline: cannot reach ws://x\n") == 1
