"""Markdown on a terminal: what is drawn, and that corrections leave what a text at once would be."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from edge_client.cli.dialogue import Dialogue
from edge_client.cli.offline_check import OfflineCheck
from edge_client.cli.written_answer import WrittenAnswer
from edge_client.events import AnswerSoFar, Confirm, Done, Event, Prompt, Retract, Token
from edge_client.screen.live import PROVISIONAL
from edge_client.screen.markdown import CODE, MARK, MarkdownLines
from edge_client.screen.views import make_view
from edge_client.settings import ClientSettings
from tests.edge.test_screen import STATS, on_screen

ANSWER = """\
## A *list* of **two**
Take `a * b` and **bold `code`**, but 2*3*4 and **no end.

- one
  * **two**
> said
---
```python
def f(x):  # **not bold**
    return `x`
```
1. three | four
"""
DRAWN = """\
A *list* of two
Take a * b and bold code, but 2*3*4 and **no end.

• one
  • two
│ said
---
```python
def f(x):  # **not bold**
    return `x`
```
1. three | four
"""


def styled(text: Text) -> list[tuple[str, str]]:
    """The pieces of a text that have a style, each with its style."""
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_marks_become_what_they_mean() -> None:
    drawn = MarkdownLines().drawn(Text(ANSWER))
    assert drawn.plain == DRAWN
    pieces = styled(drawn)
    assert ("bold", "bold") not in pieces, "a longer piece is bold"
    for piece in [
        ("A *list* of two", "bold"),
        ("a * b", CODE),
        ("code", CODE),
        ("bold code", "bold"),
        ("---", MARK),
        ("```python", MARK),
        ("    return `x`", CODE),
    ]:
        assert piece in pieces, piece


@pytest.mark.parametrize(
    ("before", "text", "drawn", "style"),
    [
        ("```py", "thon\nx = 1", "thon\nx = 1", [("thon", MARK), ("x = 1", CODE)]),
        ("````\n```\n", "- x", "- x", [("- x", CODE)]),
        ("```\n``", "`\n- x", "`\n• x", [("`", MARK)]),
        ("~~~\n```\n~~~\n", "- x", "• x", []),
        ("three ", "- two", "- two", []),
        ("", "x" * 2001 + " **y**", "x" * 2001 + " **y**", []),
    ],
)
def test_it_goes_on_behind_text_that_is_on_the_screen(
    before: str, text: str, drawn: str, style: list[tuple[str, str]]
) -> None:
    found = MarkdownLines(before).drawn(Text(text))
    assert found.plain == drawn
    assert styled(found) == style


def test_what_is_not_verified_looks_so_under_every_mark() -> None:
    lines = MarkdownLines()
    text = lines.open_drawn(Text("**bo") + Text("ld**\n- x `y`\n> z\n```\nw", PROVISIONAL))
    assert text.plain == "bold\n• x y\n│ z\n```\nw"
    is_marked = [False] * len(text)
    for span in text.spans:
        if str(span.style) == PROVISIONAL:
            is_marked[span.start : span.end] = [True] * (span.end - span.start)
    unmarked = [letter for letter, marked in zip(text.plain, is_marked, strict=True) if not marked]
    assert "".join(unmarked).replace("\n", "").strip() == "bo"
    assert lines.drawn(Text("- x")).plain == "• x", "open lines leave no block open"


def shown(events: list[Event]) -> str:
    """What a terminal is sent for an answer."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=70)
    with make_view(console=console, markdown_after="") as view:
        for event in events:
            view.take(event)
    return out.getvalue()


def done(text: str) -> Done:
    return Done(reason="eos", verified=True, text=text, stats=STATS)


def pieces_of(text: str, dice: random.Random) -> list[str]:
    """A text cut into tokens."""
    pieces = []
    while text:
        size = dice.randint(1, 6)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def with_corrections(text: str, dice: random.Random) -> list[Event]:
    """Events of an answer that is this text in the end, of which the device wrote parts alone, right
    or wrong."""
    events: list[Event] = [Prompt(ids=[1])]
    position = 1
    written = ""
    for piece in pieces_of(text, dice):
        match dice.choice(["verified", "confirmed", "withdrawn"]):
            case "verified":
                events.append(token(position, piece, "verified"))
            case "confirmed":
                events.append(token(position, piece, "provisional"))
                events.append(Confirm(start=position, stop=position + 1))
            case _:
                wrong = pieces_of(dice.choice(["```\n", "**", "- x\n\n", "`", "# y\n"]), dice)
                for place, part in enumerate(wrong, position):
                    events.append(token(place, part, "provisional"))
                stop = position + len(wrong)
                events.append(Retract(start=position, stop=stop, characters=len(written)))
                events.append(token(position, piece, "verified"))
        written += piece
        position += 1
    return [*events, done(text)]


def token(position: int, text: str, status: Any) -> Token:
    return Token(position=position, id=position, text=text, status=status)


@pytest.mark.parametrize("seed", range(20))
def test_corrections_leave_what_a_text_at_once_is(seed: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=70)
    console.print(MarkdownLines().drawn(Text(ANSWER)))
    expected = on_screen(out.getvalue())[:-1]
    found = on_screen(shown(with_corrections(ANSWER, random.Random(seed))))
    assert found[: len(expected)] == expected
    below = "".join(letter for letter, _ in found[len(expected)])
    assert below.startswith("2 tokens · "), "nothing else stays"


async def test_a_late_correction_goes_on_in_the_block_where_it_begins() -> None:
    """The answer began in an earlier turn, and its second line is another one."""
    told = AnswerSoFar()
    for event in [Prompt(ids=[1]), token(1, "- a\n", "verified"), token(2, "- b", "provisional")]:
        told.take(event)

    class Corrected:
        unverified = True

        async def recheck(self, *, persists: bool) -> AsyncGenerator[Event, None]:
            self.unverified = False
            yield Retract(start=2, stop=3, characters=4)  # those that stay
            yield token(2, "- c\n```\n- d", "verified")
            yield done("- a\n- c\n```\n- d")

    dialogue = Dialogue(ClientSettings())
    dialogue.messages.append({"role": "user", "content": "?"})
    message = dialogue.answered("```\n- a\n- b")
    said: list[Text] = []
    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    conversation: Any = Corrected()
    answer = WrittenAnswer(dialogue, message, told)
    check = OfflineCheck(
        client, conversation, [answer], is_latest_turn=True, say=said.append, markdown=True
    )
    check.start()
    await check.finish(60.0)
    assert [text.plain for text in said[1:-1]] == ["- c\n```", "• d"]
    assert styled(said[1]) == [("- c", CODE), ("```", MARK)]


def test_where_a_bold_word_could_not_be_seen_its_marks_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = [Prompt(ids=[1]), token(1, ANSWER, "verified"), done(ANSWER)]
    assert ANSWER not in shown(events)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ANSWER in shown(events)
