"""What is shown of an answer: control sequences are escaped, no text is shown twice or lost."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.segment import ControlType
from rich.text import Text

from edge_client.cli.generate import JsonAnswer, JsonLines
from edge_client.events import Confirm, Done, Event, Link, Notice, Progress, Prompt, Retract, Token
from edge_client.screen.live import LiveView, Region, summary
from edge_client.screen.pipe import PipeView
from edge_client.screen.views import make_console, make_view
from edge_client.screen.words import named

STATS = {
    "tokens": 2,
    "calls": 1,
    "retracted": 1,
    "tokens_per_forward": 1.5,
    "first_token_seconds": 1.0,
    "last_token_seconds": 1.25,
    "seconds": 6.0,
}
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\u202ed"


def token(position: int, text: str, status: Any = "verified") -> Token:
    return Token(position=position, id=position, text=text, status=status)


def done(text: str, *, verified: bool = True) -> Done:
    return Done(reason="length", verified=verified, text=text, stats=STATS)


STORY: list[Event] = [
    Prompt(ids=[1, 2]),
    token(2, "one\n"),
    token(3, "two", "provisional"),
    token(4, "three", "provisional"),
    Confirm(start=3, stop=4),
    Retract(start=4, stop=5, characters=7),
    token(4, "four"),
    done("one\ntwofour"),
]


def shown(events: Sequence[Event], **how: Any) -> str:
    """What a terminal is sent, without rich's own control sequences."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, record=True, color_system=None)
    with make_view(console=console, **how) as view:
        assert isinstance(view, LiveView)
        for event in events:
            view.take(event)
    assert "\x1b]0" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    return console.export_text()


def on_screen(sent: str, height: int = 10**6) -> list[list[tuple[str, str]]]:
    """The rows that a terminal shows after it was sent this: characters with their style. It knows
    no more of control sequences than what a redrawn region needs."""
    rows: list[list[tuple[str, str]]] = [[]]
    row = 0
    style = ""
    for text, code, kind in re.findall(
        r"([^\x1b])|\x1b\[([?\d;]*)([A-Za-z])", sent.replace("\r", "")
    ):
        if kind == "m":
            style = code if code != "0" else ""
        elif kind == "A":
            row = max(row - int(code or 1), len(rows) - height)  # not out of the window
        elif kind == "K":
            rows[row] = []
        elif text == "\n":
            row += 1
            rows += [[]] * (row - len(rows) + 1)
        elif text:
            rows[row] = [*rows[row], (text, style)]
    return rows


def piped(events: Sequence[Event]) -> None:
    with PipeView() as view:
        for event in events:
            view.take(event)


def test_a_pipe_sees_only_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    piped(STORY[:-1])
    assert capsys.readouterr().out == "one\ntwofour"
    piped(STORY[:4])
    assert capsys.readouterr().out == "one\n", "provisional text is not written"
    piped(STORY)
    assert capsys.readouterr().out == "one\ntwofour\n"


def test_a_pipe_hears_that_the_link_is_back(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line said that the upstream is offline, though all came to be verified."""
    away = Link(state="offline", detail="the upstream is not reached")
    for state, verified in (("online", True), ("late", False)):
        end = Done(reason="eos", verified=verified, text="a", stats={})
        piped([Prompt(ids=[1]), away, Link(state=state), end])
        told = capsys.readouterr().err
        assert "edge-client: offline: the upstream is not reached\n" in told
        assert told.endswith("online again: the target has verified all of this\n") == verified
    piped(
        [
            Prompt(ids=[1]),
            Link(state="online"),
            Done(reason="eos", verified=True, text="a", stats={}),
        ]
    )
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_everything_and_ends_with_the_text() -> None:
    text = shown(STORY)
    assert "one\n" in text
    assert "twofour" in text
    assert "1 corrected" in text


def test_a_continuation_does_not_say_that_nothing_before_it_is_verified() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    with make_view(console=console, markdown_after="The verified beginning") as view:
        for event in (
            Prompt(ids=[1]),
            token(2, " and", "provisional"),
            done(" and", verified=False),
        ):
            view.take(event)
    assert "nothing of this part verified" in screen.getvalue()


@pytest.mark.parametrize(
    ("status", "says"),
    [("provisional", "nothing verified"), ("verified", "the last 1 token not verified")],
)
def test_how_much_is_verified_and_the_context_is_full_is_on_the_screen(
    status: Any, says: str
) -> None:
    events = [Prompt(ids=[1, 2, 3]), token(3, "one", status), token(4, "two", "provisional")]
    more = "/continue goes on"
    text = shown([*events, done("onetwo", verified=False)], context=64, more=more)
    assert "2 tokens · 1.6/s · first after 1.0 s · 1.50 tokens a forward · " in text, (
        "the wait at the end is no part of the speed"
    )
    assert f"{says} · cut at 2 tokens: /continue goes on · context 5 of 64" in one_line(text)
    stopped = Done(reason="guard", verified=False, text="onetwo", stats=STATS)
    assert "the device stops here" in one_line(shown([*events, stopped]))


def test_an_answer_whose_tokens_are_verified_and_its_end_is_not_says_so() -> None:
    """It said "the last 0 tokens not verified"."""
    events = [Prompt(ids=[1]), token(1, "one"), token(2, "two")]
    text = one_line(shown([*events, done("onetwo", verified=False)]))
    assert " · its end not verified · " in text
    assert "last 0 tokens" not in text


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_remark_waits_for_the_end_of_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # as in `make demo 2>&1 | less`
    remark = Notice(message="the link is cut")
    piped(
        [
            Prompt(ids=[1]),
            Notice(message="before"),
            token(1, "a gar"),
            remark,
            token(2, "den\nand"),
            token(3, "\n"),
        ]
    )
    assert (
        capsys.readouterr().out
        == "edge-client: before\na garden\nand\nedge-client: the link is cut\n"
    )


def test_the_record_holds_ids_and_statuses() -> None:
    answer = JsonAnswer()
    for event in STORY:
        answer.take(event)
    report = answer.report()
    assert report["token_ids"] == [2, 3, 4]
    assert report["status"] == ["verified"] * 3
    assert [event["event"] for event in report["events"]] == ["confirm", "retract"]
    msgspec.json.encode(report)


def test_what_a_verifier_hides_in_text_is_seen_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = [
        Prompt(ids=[1]),
        Link(state="offline", detail=HOSTILE),
        Notice(message=HOSTILE),
        token(1, HOSTILE),
        token(2, HOSTILE + "\n", "provisional"),
        done(HOSTILE * 2 + "\n" + HOSTILE, verified=False),
    ]
    assert "a\\x1b]0;title\\x07b\\x1b[2Jc\\u202ed" in shown(events)
    piped(events)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err
    assert captured.out == HOSTILE * 2 + "\n" + HOSTILE + "\n", "a file gets the text as it is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    piped(events)
    assert "\x1b" not in capsys.readouterr().out, "a dumb terminal obeys nothing either"


def test_what_was_held_back_is_shown_in_the_end() -> None:
    assert "one\nTh\n" in shown([Prompt(ids=[1]), token(1, "one"), token(2, ""), done("one\nTh")])


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (Link(state="late"), "the verifier did not answer in time"),
        (
            Link(state="late", detail="gpu:8000 has not answered yet"),
            "gpu:8000 has not answered yet",
        ),
    ],
)
def test_a_pipe_is_told_why_nothing_was_verified_although_the_link_is_up(
    link: Link, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    piped([Prompt(ids=[1]), link, token(1, "one", "provisional"), done("one", verified=False)])
    line = f"edge-client: nothing of this was verified by the target: {why}\n"
    assert capsys.readouterr().err.startswith(line)


def test_why_the_verifier_was_not_there_stays_on_the_screen() -> None:
    away = Link(state="offline", detail="cannot reach ws://x")
    events = [
        Prompt(ids=[1]),
        away,
        away,
        token(1, "one", "provisional"),
        done("one", verified=False),
    ]
    assert shown(events).count("offline: cannot reach ws://x\n") == 1
    again = shown(events, trouble="cannot reach ws://x")
    assert again.startswith("still not online\n")
    assert "cannot reach" not in again.partition("●")[0]


@pytest.mark.parametrize(
    ("before", "after", "rows"), [(80, 80, 2), (80, 40, 3), (80, 20, 5), (80, 200, 2)]
)
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


def test_the_thread_that_redraws_does_not_come_between_a_line_and_its_drawing() -> None:
    """It would erase the rows of a drawing that is not on the screen yet, and others with them."""
    others: list[threading.Thread] = []
    begins = threading.Event()

    class Slow(Console):
        """While a line waits to be written, the other thread redraws, if it can."""

        def _write_buffer(self) -> None:
            if begins.is_set() and not others:
                others.append(threading.Thread(target=view._live.refresh))
                others[0].start()
                others[0].join(0.5)  # it has to wait for this very line
            super()._write_buffer()

    out = io.StringIO()
    with LiveView(Slow(file=out, force_terminal=True, width=80)) as view:
        for event in (Prompt(ids=[1]), Notice(message="first"), Notice(message="second")):
            view.take(event)
        view._live.refresh()
        view.take(token(1, "one\ntwo\nthree\n", "provisional"))  # more rows than are drawn
        begins.set()
        view.take(Notice(message="third"))
        others[0].join()
    rows = ["".join(letter for letter, _ in row) for row in on_screen(out.getvalue())]
    assert rows[:4] == ["first", "second", "third", "one"]


def test_text_longer_than_the_window_is_no_more_than_once_on_the_screen() -> None:
    out = io.StringIO()
    lines = [f"line {number}" for number in range(60)]
    lines[50] = "long " * 40
    with LiveView(Console(file=out, force_terminal=True, width=80, height=24)) as view:
        view.take(Prompt(ids=[1]))
        for position, line in enumerate(lines, 1):
            view.take(token(position, f"{line}\n", "provisional"))
            view._live.refresh()
        rows = ["".join(letter for letter, _ in row) for row in on_screen(out.getvalue(), 24)]
        assert "line 59" in rows
        assert "… what is above is printed when it is final" in rows
        view.take(done("\n".join(lines) + "\n", verified=False))
    rows = ["".join(letter for letter, _ in row) for row in on_screen(out.getvalue(), 24)]
    shown = [row for row in rows if row.startswith("line ")]
    assert shown == [line for line in lines if line.startswith("line ")]


def test_a_wait_without_news_is_counted_on_the_screen() -> None:
    now = 0.0
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)

    def drawn(seconds: float) -> str:
        nonlocal now
        now += seconds
        out.truncate(out.seek(0))
        view._live.refresh()
        return one_line(out.getvalue())

    with LiveView(console, clock=lambda: now) as view:
        view.take(Prompt(ids=[1]))
        view.take(Link(state="online"))
        assert "waiting" not in drawn(0.6)
        assert "● online · nothing new for 3 s" in drawn(2.5)
        view.take(token(1, "one"))
        assert "waiting" not in drawn(0)
        view.take(Progress(done=5, total=9))
        assert "the verifier reads: 5 of 9 · 1 token · nothing new for 2 s" in drawn(2.1)
        view.take(Progress(done=5, total=9))
        assert "nothing new for 4 s" in drawn(2.1), "it has not come further"


def test_a_window_of_the_usual_width_shows_how_much_is_not_verified() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    view = LiveView(console)
    view.take(Prompt(ids=[1]))
    view.take(Link(state="late"))
    for position in range(1, 124):
        view.take(token(position, "a", "provisional"))
    (shown,) = console.render_lines(view.status())
    words = "the verifier is late: this device goes on · 123 tokens · 123 not verified"
    assert words in "".join(segment.text for segment in shown)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Link(state="connecting"), "● connecting to the upstream"),
        (Link(state="late"), "● the upstream is late"),
        (Progress(done=3, total=44), "● the upstream reads: 3 of 44"),
        (Progress(done=0, total=44), "● connecting to the upstream"),
    ],
)
def test_an_upstream_is_called_so(event: Event, words: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    view = LiveView(console, who_verifies="the upstream")
    view.take(Prompt(ids=[1]))
    view.take(event)
    assert view.status().plain == words


def test_a_long_reason_leaves_room_for_what_happens() -> None:
    """It stands above the answer; below, a line of the window's width says what is going on."""
    away = Link(state="offline", detail="cannot reach ws://127.0.0.1:8765: " + "why " * 60)
    view = LiveView(Console(file=io.StringIO(), force_terminal=True, width=80))
    for event in (Prompt(ids=[1]), away, Progress(done=3, total=44, by="device")):
        view.take(event)
    assert view.status().plain == "● this device reads: 3 of 44"


def test_a_verifier_reads_on_while_the_device_writes_and_not_behind_the_end_of_the_link() -> None:
    view = LiveView(Console(file=io.StringIO(), force_terminal=True, width=120))
    alone = Token(position=1, id=2, text="a", status="provisional")
    reads = Progress(done=5, total=9)
    for event in (Prompt(ids=[1]), Link(state="online"), reads, Link(state="late"), alone):
        view.take(event)
    words = "● the verifier reads: 5 of 9 · 1 token · 1 not verified"
    assert view.status().plain == words, "and not one and the other in turn"
    view.take(Link(state="offline"))
    assert view.status().plain == "● offline · 1 token · 1 not verified"
    for end in (Confirm(start=1, stop=2), Token(position=2, id=3, text="b", status="verified")):
        view.take(reads)
        view.take(Link(state="online"))
        view.take(end)
        assert "reads" not in view.status().plain


def test_no_status_says_online_below_the_line_that_the_link_is_lost() -> None:
    screen = io.StringIO()
    console = Console(
        file=screen, force_terminal=True, width=80, height=9, _environ={"TERM": "xterm"}
    )
    with LiveView(console) as view:
        for event in (Prompt(ids=[1]), Link(state="online"), Link(state="offline", detail="gone")):
            view.take(event)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue())
    below = shown.partition("offline: gone")[2]
    assert "● offline" in below
    assert "● online" not in below


def test_no_line_stands_twice_for_a_moment_when_it_is_final() -> None:
    screen = io.StringIO()
    console = Console(
        file=screen, force_terminal=True, width=80, height=9, _environ={"TERM": "xterm"}
    )
    view = LiveView(console)
    view._live.auto_refresh = False  # only what is drawn below is looked at
    with view:
        view.take(Prompt(ids=[1]))
        view.take(Token(position=1, id=2, text="one line", status="verified"))
        view._live.refresh()
        before = len(screen.getvalue())
        view.take(Token(position=2, id=3, text="\n", status="verified"))
        drawn = re.sub(r"\x1b\[[\d;?]*\w", "", screen.getvalue()[before:])
    assert drawn.count("one line") == 1


def test_a_sibling_is_called_by_its_name() -> None:
    assert named("independent:models/coder05") == named("coder05") == "coder05"


def test_figures_of_the_link_are_not_of_an_answer_that_had_no_part_in_it() -> None:
    stats = STATS | {"rtt_ms": 9.0, "sent_bytes": 0, "received_bytes": 0}
    alone = Done(reason="eos", verified=False, text="one", stats=stats | {"calls": 0})
    assert "RTT" not in summary(alone, ["provisional"])
    assert "RTT 9 ms" in summary(Done(reason="eos", verified=True, text="one", stats=stats), [])


def test_the_last_line_says_why_a_verifier_that_is_reached_has_verified_nothing() -> None:
    why = "the verifier refuses for now: your key's limit is reached (max_tokens_per_second)"
    events = [Prompt(ids=[1]), Link(state="late", detail=why), token(1, "a", "provisional")]
    assert f"nothing verified: {why}" in " ".join(
        shown([*events, done("a", verified=False)]).split()
    )
    assert why not in shown([*events, Link(state="online"), done("a")])


RATE = "your rate at the verifier is used up (max_tokens_per_second)"


def test_who_has_used_up_his_rate_is_told_so_above_the_text_and_beside_it() -> None:
    events: list[Event] = [Prompt(ids=[1]), Link(state="limited", detail=RATE)]
    events.append(Link(state="limited", detail=f"{RATE}: it goes on in 4 s"))
    text = " ".join(shown([*events, token(1, "a"), done("a")]).split())
    assert text.count("max_tokens_per_second") == 1, "once; the status line tells the rest"
    assert "late" not in text
    view = LiveView(Console(file=io.StringIO(), force_terminal=True))
    for event in events:
        view._link = event if isinstance(event, Link) else view._link
    assert "your rate at the verifier is used up" in view.status().plain
    unverified = shown([*events, token(1, "a", "provisional"), done("a", verified=False)])
    assert f"nothing verified: {RATE}: it goes on in 4 s" in " ".join(unverified.split())


def test_a_pipe_says_once_that_the_rate_is_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    with PipeView(says_unverified=False) as view:
        for event in (
            Prompt(ids=[1]),
            Link(state="limited", detail=RATE),
            token(1, "a"),
            Link(state="online"),
            Link(state="limited", detail=f"{RATE}: it goes on in 4 s"),
            done("a"),
        ):
            view.take(event)
    told = capsys.readouterr().err
    assert told.startswith(f"edge-client: {RATE}\n")
    assert told.count(RATE) == 1


def test_a_line_in_a_pipe_stays_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("word " * 60 + "[end] :smile:")
    assert capsys.readouterr().out == "word " * 60 + "[end] :smile:\n"


def test_a_program_is_told_only_when_reading_has_come_further(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A verifier that reads says so each second, with the same numbers."""
    said = [Progress(done=done, total=9) for done in (0, 0, 0, 5, 5)]
    answer = JsonAnswer()
    lines = JsonLines()
    for event in said:
        answer.take(event)
        lines.take(event)
    told = [event["done"] for event in answer.report()["events"]]
    assert told == [0, 5]
    written = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["done"] for line in written] == [0, 5]
