"""A chat's turns with a scripted network: offline text is corrected, and Ctrl-C asks first."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from edge_client.cli import chat
from edge_client.cli.chat import ChatLoop
from edge_client.cli.dialogue import Dialogue
from edge_client.events import Done, Event, Link, Prompt, Token
from edge_client.link.state import LinkWatch
from edge_client.screen.ctrl_c import Interrupted
from edge_client.settings import ClientSettings
from moa.errors import LinkError, UsageError
from moa.grammar.spec import Grammar
from tests.edge.test_screen import done

HALF, CTRL_C = b"", b"\x03"
"""Ctrl-C after a part of a line was typed, and alone."""
Keys = str | bytes


class Lines:
    """Lines of a user's; Ctrl-C comes in its turn."""

    interactive = False

    def __init__(self, *lines: Keys) -> None:
        self._lines = list(lines)
        self.shown: list[str] = []
        self._begun = False

    async def read(self) -> str | None:
        for _ in range(10):  # typing takes time, in which the network can run
            await asyncio.sleep(0)
        line = self._lines.pop(0) if self._lines else None
        self._begun = line is HALF
        if isinstance(line, bytes):
            raise Interrupted
        return line

    def begun(self) -> bool:
        return self._begun

    def above(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def show(self, status: str) -> None:
        self.shown.append(status)

    def prefill(self, text: str) -> None:
        self._lines.insert(0, text + "!")


class Played:
    """A conversation whose answers are written down before."""

    def __init__(self, answers: Sequence[Done | Exception], checked: Done | None = None) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.changes: list[dict[str, Any]] = []
        self.predicted: list[list[int]] = []
        self.unverified = False
        self._answers = list(answers)
        self._checked = checked

    async def generate(
        self,
        messages: list[dict[str, str]],
        grammar: Grammar | None = None,
        prediction: Sequence[int] = (),
        **changes: Any,
    ) -> AsyncGenerator[Event, None]:
        if changes.get("written"):
            return  # an earlier answer, which is to be checked: nothing comes of it here
        self.asked.append(messages)
        self.predicted.append(list(prediction))
        self.changes.append(changes)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield Prompt(ids=[1])
        yield Token(
            position=1,
            id=2,
            text=answer.text,
            status="verified" if answer.verified else "provisional",
        )
        self.unverified = not answer.verified
        yield answer

    async def recheck(self, *, persists: bool) -> AsyncGenerator[Event, None]:
        self.unverified = False
        assert self._checked is not None
        yield self._checked


async def talk(
    played: Played, *lines: Keys, online: Sequence[bool] = (True,), trouble: str = ""
) -> tuple[Dialogue, str]:
    """The dialogue and the screen after a chat; `online` are the states of the link at each check,
    the last one repeated, and `trouble` is what the welcome said of it."""
    looks = list(online)

    async def wait_online() -> None:
        raise LinkError("not yet")

    class Link:
        @property
        def up(self) -> bool:
            return looks.pop(0) if len(looks) > 1 else looks[0]

    client = SimpleNamespace(
        link=Link(),
        shared=SimpleNamespace(
            max_context=100, link=object(), welcome=object(), has_engine_behind=False
        ),
        settings=ClientSettings(max_new_tokens=64),
        wait_online=wait_online,
    )
    screen = io.StringIO()
    dialogue = Dialogue(ClientSettings(max_new_tokens=20))
    console = Console(file=screen, width=200, markup=False, highlight=False)
    parts: Any = (client, played, dialogue, Lines(*lines), console)
    await ChatLoop(*parts, trouble=trouble).run()
    return dialogue, screen.getvalue()


async def test_what_was_written_offline_is_corrected_in_the_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    played = Played(
        [done("wrong", verified=False), done("fine", verified=True)], done("right", verified=True)
    )
    dialogue, screen = await talk(played, "one", "two")
    assert "corrects the last answer:\nright" in screen
    assert [message["content"] for message in played.asked[1]] == ["one", "right", "two"]
    assert [message["content"] for message in dialogue.messages] == ["one", "right", "two", "fine"]
    assert capsys.readouterr().out == "wrong\nfine\n"


async def test_what_was_written_offline_is_confirmed_once_the_verifier_is_back() -> None:
    played = Played(
        [done("same", verified=False), done("b", verified=True)], done("same", verified=True)
    )
    assert "the target's own" in (await talk(played, "one"))[1]
    played = Played(
        [done("a", verified=False), done("b", verified=True)], done("never", verified=True)
    )
    dialogue, screen = await talk(played, "one", "two", online=(False,))
    assert "the verifier is back" not in screen, "while it is away nothing is checked"
    assert "goes on from an answer of which 1 token is not verified" in screen
    assert dialogue.messages[1]["content"] == "a"


@pytest.mark.parametrize(
    "keys", [(CTRL_C, "one", CTRL_C, CTRL_C, "two"), (CTRL_C, HALF, HALF, CTRL_C, "one")]
)
async def test_ctrl_c_at_the_prompt_asks_first_and_with_text_typed_only_discards_the_line(
    keys: tuple[Keys, ...],
) -> None:
    dialogue, screen = await talk(Played([done("a", verified=True)]), *keys)
    assert screen.count("Ctrl-C once more") == 2
    assert [message["content"] for message in dialogue.messages] == ["one", "a"]


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
async def test_ctrl_c_just_as_an_answer_ends_does_not_end_the_chat() -> None:
    class Late(Played):
        async def generate(
            self, messages: list[dict[str, str]], **changes: Any
        ) -> AsyncGenerator[Event, None]:
            async for event in super().generate(messages, **changes):
                yield event
            # As the loop does when it hears of the signal: the kernel's own comes at any time.
            loop: Any = asyncio.get_running_loop()
            loop.call_soon(loop._handle_signal, signal.SIGINT)

    dialogue, screen = await talk(
        Late([done("a", verified=True), done("b", verified=True)]), "one", "two"
    )
    assert screen.count("Ctrl-C once more") == 2
    assert [message["content"] for message in dialogue.messages] == ["one", "a", "two", "b"]


async def test_a_turn_that_cannot_be_had_leaves_the_conversation_as_it_was() -> None:
    played = Played(
        [UsageError("the prompt has 99 tokens"), done("b", verified=True), done("c", verified=True)]
    )
    dialogue, screen = await talk(
        played, "one", "/nonsense", "two", "/set top_k 3", "/retry", "/quit", "never"
    )
    assert "the prompt has 99 tokens" in screen
    assert "there is no /nonsense" in screen
    assert [message["content"] for message in dialogue.messages] == ["two", "c"]
    assert played.changes[-1] == {"top_k": 3, "seed": 1}


class HalfVerified(Played):
    """Its first answer has a verified beginning, and an end that the device wrote alone."""

    def __init__(self, beginning: str, then: Done) -> None:
        super().__init__([done(beginning + "alone", verified=False), then])
        self._beginning = beginning

    async def generate(
        self, messages: list[dict[str, str]], **changes: Any
    ) -> AsyncGenerator[Event, None]:
        async for event in super().generate(messages, **changes):
            if isinstance(event, Token) and len(self.asked) == 1:
                if self._beginning:
                    yield Token(position=1, id=7, text=self._beginning, status="verified")
                at = 2 if self._beginning else 1
                yield Token(position=at, id=8, text="alone", status="provisional")
            else:
                yield event


async def test_an_answer_is_continued_after_its_verified_text() -> None:
    played = HalfVerified("verified, ", done("and more", verified=True))
    dialogue, screen = await talk(played, "one", "/continue", online=(False,))
    assert [message["content"] for message in played.asked[1]] == ["one", "verified, "]
    assert played.predicted[1] == [8], "the verifier reads what the device wrote"
    goes_on = 'goes on after "verified,": what stood behind it, 1 token, is asked again'
    assert goes_on in screen
    assert [message["content"] for message in dialogue.messages] == ["one", "verified, and more"]


async def test_a_question_that_was_stopped_before_its_answer_is_taken_back() -> None:
    """The next question carried it along, with the file that had been read for it."""
    played = Played([Interrupted(), done("fine", verified=True)])  # type: ignore[list-item]
    dialogue, screen = await talk(played, "one", "two", online=(True,))
    assert "stopped: the question is taken back" in screen
    assert [message["content"] for message in dialogue.messages] == ["two", "fine"]


@pytest.mark.parametrize(
    ("verified", "says"), [(True, "1 token · verified"), (False, "1 token · nothing verified")]
)
async def test_of_a_stopped_answer_is_told_how_long_it_is_and_what_is_verified(
    verified: bool, says: str
) -> None:
    """There stood "stopped" alone, where a whole answer has its figures."""

    class Stopped(Played):
        async def generate(
            self, messages: list[dict[str, str]], **changes: Any
        ) -> AsyncGenerator[Event, None]:
            async for event in super().generate(messages, **changes):
                if isinstance(event, Done):
                    raise Interrupted
                yield event

    _, screen = await talk(Stopped([done("half", verified=verified)]), "one")
    assert f"stopped · {says}\n" in screen


async def test_an_answer_that_was_at_its_end_is_said_to_be_so() -> None:
    """There was a line of figures, and no text."""
    played = Played([done("whole", verified=True), done("", verified=True)])
    dialogue, screen = await talk(played, "one", "/continue", online=(True,))
    assert "the answer is at its end: nothing was added" in screen
    assert [message["content"] for message in dialogue.messages] == ["one", "whole"]


async def test_where_an_answer_goes_on_is_quoted_in_whole_words_without_marks() -> None:
    """It began in the middle of a word, with raw Markdown and without line ends."""
    beginning = "Lists have a head and a tail.\n2. **Reversing the `Linked` List**:\n   - "
    played = HalfVerified(beginning, done("and more", verified=True))
    _, screen = await talk(played, "one", "/continue", online=(False,))
    assert 'goes on after "2. Reversing the Linked List:": what stood' in screen


async def test_a_complete_answer_is_not_written_again_while_the_verifier_is_away() -> None:
    complete = msgspec.structs.replace(done("alone", verified=False), reason="eos")
    played = Played([complete, done("never", verified=True)])
    dialogue, screen = await talk(played, "one", "/continue", online=(False,))
    assert "the answer is complete: 1 token is not verified" in screen
    assert len(played.asked) == 1
    assert [message["content"] for message in dialogue.messages] == ["one", "alone"]


async def test_why_the_link_is_down_is_told_in_full_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Away(Played):
        async def generate(
            self, messages: list[dict[str, str]], **changes: Any
        ) -> AsyncGenerator[Event, None]:
            async for event in super().generate(messages, **changes):
                yield event
                if isinstance(event, Prompt):
                    yield Link(state="online" if len(self.asked) == 3 else "offline", detail="why")

    answers = [done(name, verified=True) for name in "abcd"]
    await talk(Away([*answers]), "one", "two", "three", "four")
    told = [line for line in capsys.readouterr().err.splitlines() if "line" in line]
    assert told == [
        f"edge-client: {said}" for said in ("offline: why", "still not online", "offline: why")
    ]
    await talk(Away([done("a", verified=True)]), "one", trouble="why")
    said = capsys.readouterr().err
    assert said.startswith("edge-client: still not online\n"), "it never was online"


async def test_an_answer_without_verified_text_is_asked_for_again() -> None:
    played = HalfVerified("", done("all of it", verified=True))
    dialogue, screen = await talk(played, "one", "/continue", online=(False,))
    assert "asked again: nothing of it was verified, 1 token" in screen
    assert [message["content"] for message in played.asked[1]] == ["one"]
    assert played.predicted[1] == [8]
    assert [message["content"] for message in dialogue.messages] == ["one", "all of it"]


async def test_a_chat_that_stands_idle_tells_that_the_verifier_is_lost_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told with the next question."""
    looks = iter(["", "offline: gone", "", "online"])
    shown = asyncio.Event()

    class Watch(LinkWatch):
        def look(self, now: float) -> str:
            news = next(looks, "")
            self.trouble = {"online": "", "offline: gone": "gone"}.get(news, self.trouble)
            if news == "online":
                asyncio.get_running_loop().call_soon(shown.set)
            return news

    class Idle(Lines):
        interactive = True

        async def read(self) -> str | None:
            async with asyncio.timeout(60):
                await shown.wait()
            return None

    monkeypatch.setattr(chat, "LinkWatch", Watch)
    monkeypatch.setattr(chat, "_WATCH_SECONDS", 0.001)
    client = SimpleNamespace(link=object(), settings=ClientSettings())
    screen = io.StringIO()
    parts: Any = (client, Played([]), Dialogue(ClientSettings()), Idle(), Console(file=screen))
    await ChatLoop(*parts).run()
    assert screen.getvalue().splitlines() == ["offline: gone", "online"]
