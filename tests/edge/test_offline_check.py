"""The check of offline text in a chat, with a real verifier that is as slow as a real model on a
CPU: it shows itself, nothing ends it early, and nobody goes on from unverified text unawares."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import termios
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from cloud_verifier.app import Verifier
from cloud_verifier.emulated import slowed_down
from cloud_verifier.forward_time import ForwardTime
from edge_client.cli.chat import ChatLoop
from edge_client.cli.dialogue import Dialogue, Loaded
from edge_client.cli.offline_check import OfflineCheck
from edge_client.cli.written_answer import WrittenAnswer
from edge_client.client import EdgeClient
from edge_client.device import embedded_bundle
from edge_client.events import AnswerSoFar, Confirm, Done, Event, Link, Progress, Prompt, Retract
from edge_client.settings import ClientSettings
from edge_client.text.codec import TextCodec
from moa.bundle import Bundle
from moa.errors import UsageError
from moa.process.listening import Port
from moa.target.contract import Step
from moa.target.rows import Row
from tests.edge.serve import pair
from tests.edge.test_chat import CTRL_C, Lines
from tests.edge.test_screen import done, token

QUESTION = "Tell me a story about a dog and a garden."
"""The demo's drafter answers it with another text than its target."""


class Waits(Lines):
    """Lines of a user who waits between them: for a word in the status, or on the screen."""

    def __init__(self, screen: io.StringIO, *lines: Any) -> None:
        super().__init__(*lines)
        self.screen = screen

    async def read(self) -> str | None:
        while self._lines and callable(self._lines[0]):
            wait: Any = self._lines.pop(0)
            await wait(self)
        return await super().read()


async def seen(words: str, reader: Waits) -> None:
    """Wait until the user sees these words, or has seen them since: on a busy machine a status may
    be followed by others before this looks again."""
    first = max(0, len(reader.shown) - 3)
    async with asyncio.timeout(60):
        while words not in "\n".join((reader.screen.getvalue(), *reader.shown[first:])):
            await asyncio.sleep(0.01)


SETTLE = 0.02
"""Seconds for which a turn waits for the check of its text."""
SLOW = 4 * SETTLE
"""Seconds of a forward: as if a real model ran on a CPU, whose forward takes longer than a turn
waits."""
SETTINGS = replace(pair.SETTINGS, slots=4, kv_tokens=4096)


@contextlib.asynccontextmanager
async def slow_verifier(
    port: Port, forward: float, goes_on: threading.Event | None = None
) -> AsyncIterator[None]:
    """A verifier whose forwards take so long. Once it listens they are held until they may go on."""
    served = pair.served(SETTINGS)
    target = slowed_down(served.target, ForwardTime(forward))
    real = target.forward

    def held(rows: Sequence[Row]) -> Step:
        assert goes_on is not None
        goes_on.wait(60)
        return real(rows)

    with port as taken:
        verifier = Verifier(served, SETTINGS)
        async with verifier.open(taken):
            if goes_on is not None:
                target.forward = held  # type: ignore[method-assign]
            yield


async def chat(
    *lines: Any, forward: float = SLOW, goes_on: threading.Event | None = None
) -> tuple[Dialogue, str, list[str]]:
    """A chat that begins without its verifier; `up` among the lines starts it."""
    port = Port("127.0.0.1", 0)  # it refuses connections until a verifier listens
    settings = ClientSettings(
        verifier=f"ws://127.0.0.1:{port.number}", settle_seconds=SETTLE, reconnect_seconds=0.1
    )
    screen = io.StringIO()
    console = Console(file=screen, width=200, markup=False, highlight=False)
    dialogue = Dialogue(settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(port.socket.close)

        running = await stack.enter_async_context(contextlib.AsyncExitStack())
        leaving: list[asyncio.Task[None]] = []

        async def up(_: Waits) -> None:
            await running.enter_async_context(slow_verifier(port, forward, goes_on))

        async def down_later(reader: Waits) -> None:
            async def down() -> None:
                await seen("Ctrl-C goes on without", reader)
                await running.aclose()

            leaving.append(asyncio.create_task(down()))

        events = {"up": up, "down later": down_later}
        reader = Waits(screen, *(events.get(line, line) for line in lines))
        async with EdgeClient(settings) as client, client.conversation() as conversation:
            parts: Any = (client, conversation, dialogue, reader, console)
            await ChatLoop(*parts).run()
    return dialogue, screen.getvalue(), reader.shown


def sees(words: str) -> Any:
    return lambda reader: seen(words, reader)


async def test_a_slow_check_shows_itself_and_corrects_the_answer_as_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dialogue, screen, shown = await chat(
        QUESTION, sees("checked when the verifier is back"), "up", sees("· verified")
    )
    alone = capsys.readouterr().out.strip()
    assert any("checking the last answer: " in status for status in shown)
    assert any("correcting the last answer: " in status for status in shown)
    assert "the verifier is back, and corrects the last answer:" in screen
    corrected = dialogue.messages[1]["content"]
    assert corrected != alone
    assert corrected in screen


async def test_a_question_in_the_middle_waits_for_the_check_or_leaves_it_and_is_told() -> None:
    """The check begins before the question is asked, and ends after it however fast it is."""
    goes_on = threading.Event()
    waiting: list[asyncio.Task[None]] = []

    async def go_on_once_waited_for(reader: Waits) -> None:
        async def watch() -> None:
            await seen("; Ctrl-C goes on without", reader)
            goes_on.set()

        waiting.append(asyncio.create_task(watch()))

    dialogue, screen, _ = await chat(
        QUESTION,
        "up",
        sees("checking the last answer"),
        go_on_once_waited_for,
        "And what is 17 plus 25?",
        forward=0.0,
        goes_on=goes_on,
    )
    await asyncio.gather(*waiting)
    assert "; Ctrl-C goes on without" in screen
    assert "· verified" in screen
    assert "this goes on from an answer" not in screen
    assert len(dialogue.messages) == 4


async def test_ctrl_c_beside_an_empty_prompt_leaves_a_check_before_the_chat() -> None:
    """It asked whether to leave the chat, and nobody was told how the check is stopped."""
    goes_on = threading.Event()

    async def end(_: Waits) -> None:
        goes_on.set()

    _, screen, shown = await chat(
        QUESTION, "up", sees("checking the last answer"), CTRL_C, CTRL_C, end, goes_on=goes_on
    )
    assert any(line.startswith("checking ") and line.endswith("Ctrl-C stops it") for line in shown)
    assert not any("when the verifier" in line and "Ctrl-C" in line for line in shown)
    stopped, asked = screen.index("stopped: "), screen.index("Ctrl-C once more")
    assert stopped < asked
    assert re.search(r"stopped: \d+ tokens are not verified\n", screen)
    assert screen.count("Ctrl-C once more") == 1


async def test_a_question_while_the_verifier_is_away_is_told_what_it_goes_on_from() -> None:
    dialogue, screen, _ = await chat(QUESTION, "And what is 17 plus 25?", CTRL_C, CTRL_C)
    assert "this goes on from an answer of which" in screen
    assert len(dialogue.messages) == 4


QUESTIONS = (
    QUESTION,
    "Write a short story about Ben, a cat and a forest.",
    "Tell me another story with Ada.",
)


def verified(count: int) -> Any:
    """Wait until the user has been told of so many answers that they are verified."""

    async def wait(reader: Waits) -> None:
        async with asyncio.timeout(60):
            while reader.screen.getvalue().count("· verified") < count:
                await asyncio.sleep(0.01)

    return wait


async def without_an_outage(*questions: str) -> list[dict[str, str]]:
    """The messages of the same chat where the verifier is always there."""
    port = Port("127.0.0.1", 0)
    messages: list[dict[str, str]] = []
    async with (
        slow_verifier(port, 0.0),
        EdgeClient(verifier=f"ws://127.0.0.1:{port.number}") as client,
    ):
        await client.wait_online(60)
        async with client.conversation() as conversation:
            for question in questions:
                messages.append({"role": "user", "content": question})
                events = [event async for event in conversation.generate(messages)]
                done = events[-1]
                assert isinstance(done, Done)
                assert done.verified
                messages.append({"role": "assistant", "content": done.text})
    return messages


async def test_all_answers_of_an_outage_are_checked_each_behind_the_corrected_ones() -> None:
    """Only the last was checked, behind text of the device's that stood there for good."""
    all_are_verified = verified(len(QUESTIONS))
    dialogue, screen, shown = await chat(*QUESTIONS, "up", all_are_verified, forward=0.0)
    counts = [int(status.split()[0]) for status in shown if "checked when" in status]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1], "all answers are counted"
    assert "this goes on from answers of which" in screen
    assert 'and corrects the answer to "Tell me a story about a dog' in screen
    assert dialogue.messages == await without_an_outage(*QUESTIONS)


async def test_what_was_written_is_checked_by_a_verifier_that_is_slower_than_a_turn_settles() -> (
    None
):
    port = Port("127.0.0.1", 0)
    settings = ClientSettings(verifier=f"ws://127.0.0.1:{port.number}", settle_seconds=0.01)
    async with slow_verifier(port, SLOW), EdgeClient(settings) as client:
        await client.wait_online(60)
        async with client.conversation() as conversation:
            turn = conversation.generate(
                QUESTION, written=[5, 6, 7, 8], rechecks=True, max_new_tokens=4
            )
            async with contextlib.aclosing(turn):
                done = [event async for event in turn][-1]
    assert isinstance(done, Done)
    assert done.verified


async def test_what_is_taken_back_leaves_the_check_of_the_answers_before_it() -> None:
    dialogue, screen, _ = await chat(*QUESTIONS[:2], "/undo", "up", sees("· verified"), forward=0.0)
    assert dialogue.messages == await without_an_outage(QUESTIONS[0])
    assert "corrects the last answer" in screen


async def test_what_is_not_verified_is_told_where_it_is_saved_and_checked_once_it_is_loaded(
    tmp_path: Path,
) -> None:
    """It was not marked in the file, so that it was taken for the target's."""
    file = tmp_path / "chat.json"
    _, screen, _ = await chat(*QUESTIONS[:2], f"/save {file}")
    assert re.search(r"4 messages are in .*, of which \d+ tokens are not verified", screen)
    dialogue, screen, shown = await chat(f"/load {file}", "up", verified(2), forward=0.0)
    assert "[not all of this was verified by the target]" in screen
    assert any(re.match(r"\d+ tokens not verified: checked when", line) for line in shown)
    assert dialogue.messages == await without_an_outage(*QUESTIONS[:2])


async def test_a_question_behind_a_loaded_answer_is_told_what_it_goes_on_from(
    tmp_path: Path,
) -> None:
    file = tmp_path / "chat.json"
    await chat(QUESTION, f"/save {file}")
    _, screen, _ = await chat(f"/load {file}", "And what is 17 plus 25?", CTRL_C, CTRL_C)
    assert "this goes on from an answer of which" in screen


async def test_a_question_that_replaces_another_waits_for_the_check_of_the_answer_before_it() -> (
    None
):
    """The check was left with the question that was taken back, though the verifier was there."""
    dialogue, screen, _ = await chat(
        *QUESTIONS[:2], "up", sees("checking the answer to"), f"/edit {QUESTIONS[2]}"
    )
    assert screen.count("this goes on from") == 1, "the second question, before the verifier came"
    assert dialogue.messages == await without_an_outage(QUESTIONS[0], QUESTIONS[2])


async def test_a_check_without_news_is_counted_below_what_is_typed() -> None:
    """Each second, by the check itself: nothing else happens meanwhile."""
    goes_on = threading.Event()

    async def end(_: Waits) -> None:
        goes_on.set()

    _, _, shown = await chat(QUESTION, "up", sees("nothing new for 1 s"), end, goes_on=goes_on)
    assert any(line.startswith("checking the last answer") for line in shown)


@pytest.mark.parametrize("then", ["/continue", QUESTIONS[1]])
async def test_what_waits_for_a_check_goes_on_where_the_verifier_goes_meanwhile(
    tmp_path: Path, then: str
) -> None:
    """It waited for the whole outage."""
    file = tmp_path / "chat.json"
    await chat("/set max_new_tokens 20", QUESTION, f"/save {file}")
    load = [f"/load {file}", "up", sees("checking the last answer"), "down later", then]
    dialogue, screen, _ = await chat(*load, CTRL_C, CTRL_C, forward=0.5)
    assert screen.count("Ctrl-C goes on without") == 1
    went_on = "asked again: nothing of it was verified"
    if then != "/continue":
        went_on = "this goes on from an answer of which"
    assert went_on in screen.split("Ctrl-C goes on without")[1]
    assert len(dialogue.messages) == (2 if then == "/continue" else 4)


def test_what_is_typed_is_not_shown_behind_the_line_of_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, terminal = os.openpty()
    console = Console(file=io.StringIO(), force_terminal=True)
    nothing: Any = None
    check: Any = SimpleNamespace(status="checking the last answer")
    with open(ours, "rb"), open(terminal, "rb", buffering=0) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with ChatLoop(nothing, nothing, nothing, nothing, console)._following(check):
            assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        assert termios.tcgetattr(terminal)[3] & termios.ECHO


async def test_what_a_continued_answer_goes_on_from_is_told_too() -> None:
    short = "/set max_new_tokens 4"
    dialogue, screen, _ = await chat(short, *QUESTIONS[:2], "/continue", CTRL_C, CTRL_C)
    assert screen.count("this goes on from an answer of which") == 2
    assert len(dialogue.messages) == 4


class Scripted:
    """A conversation that verifies what it is asked for again, and cannot recheck."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], dict[str, Any]]] = []

    async def generate(
        self, messages: list[dict[str, str]], written: Sequence[int], **how: Any
    ) -> AsyncGenerator[Event, None]:
        how.pop("grammar")
        self.asked.append((messages, how))
        yield Prompt(ids=[1])
        for position in range(1, len(written) + 1):
            yield token(position, "", "provisional")
        yield Confirm(start=1, stop=1 + len(written))
        yield done("alone")

    async def recheck(self, *, persists: bool) -> AsyncGenerator[Event, None]:
        raise ZeroDivisionError("by zero")
        yield done("")


class Scripts(Scripted):
    """A conversation that answers with these events, and then fails if it is to."""

    def __init__(self, *events: Event, then: Exception | None = None) -> None:
        super().__init__()
        self._events = events
        self._then = then

    async def generate(
        self, messages: list[dict[str, str]], written: Sequence[int], **how: Any
    ) -> AsyncGenerator[Event, None]:
        for event in self._events:
            yield event
        if self._then is not None:
            raise self._then


def written_alone(dialogue: Dialogue, question: str) -> WrittenAnswer:
    dialogue.take(question)
    told = AnswerSoFar()
    told.take(Prompt(ids=[1]))
    told.take(Link(state="offline"))
    told.take(token(1, "alone", "provisional"))
    told.take(done("alone", verified=False))
    return WrittenAnswer(dialogue, dialogue.answered("alone"), told)


async def checked(
    scripted: Scripted, *answers: WrittenAnswer, is_latest_turn: bool = False
) -> tuple[OfflineCheck, list[str]]:
    """A check that has come to its end, and what it has said."""
    said: list[Text] = []
    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    conversation: Any = scripted
    check = OfflineCheck(
        client, conversation, answers, is_latest_turn=is_latest_turn, say=said.append
    )
    check.start()
    await check.finish(60.0)
    return check, [text.plain for text in said]


async def test_each_answer_is_checked_with_the_system_message_and_settings_it_was_asked_with() -> (
    None
):
    dialogue = Dialogue(ClientSettings(), "Be short.")
    first = written_alone(dialogue, "one")
    dialogue.take("/system Be long.")
    dialogue.take("/set top_k 3")
    second = written_alone(dialogue, "two")
    dialogue.take("/system Be kind.")
    scripted = Scripted()
    check, _ = await checked(scripted, first, second)
    (earlier, as_before), (later, changed) = scripted.asked
    assert [message["content"] for message in earlier] == ["Be short.", "one"]
    assert [message["content"] for message in later] == ["Be long.", "one", "alone", "two"]
    assert as_before.pop("rechecks")
    assert changed.pop("rechecks")
    assert (as_before, changed) == ({}, {"top_k": 3})
    assert check.unverified == 0


async def test_a_check_that_fails_in_a_correction_shows_it_and_leaves_the_answer_as_it_was() -> (
    None
):
    """The answer was cut to the half of its correction, and the device's text was nowhere."""
    dialogue = Dialogue(ClientSettings())
    answer = written_alone(dialogue, "one")
    events = (
        Prompt(ids=[1]),
        token(1, "", "provisional"),
        Retract(start=1, stop=2, characters=0),
        token(1, "right\n", "verified"),
        token(2, "so far", "verified"),
    )
    check, said = await checked(Scripts(*events, then=ZeroDivisionError("by zero")), answer)
    assert dialogue.messages[1]["content"] == "alone"
    assert said[1:3] == ["right", "so far"]
    stays = "the last answer stays as this device wrote it, and 1 token is not verified: the check"
    assert said[3].startswith(stays)
    assert check.unverified == 1


class Pauses(Scripts):
    """It tells these events, and no more."""

    def __init__(self, *events: Event) -> None:
        super().__init__(*events)
        self.told_all = asyncio.Event()

    async def generate(
        self, messages: list[dict[str, str]], written: Sequence[int], **how: Any
    ) -> AsyncGenerator[Event, None]:
        async for event in super().generate(messages, written, **how):
            yield event
        self.told_all.set()
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def pausing(
    *answers: WrittenAnswer, told: Sequence[Event], now: Sequence[float] = (0.0,)
) -> AsyncIterator[tuple[OfflineCheck, list[str]]]:
    """A check that has told these events of its first answer and waits for more, and what it has
    said; it reads the last of `now` as the time."""
    scripted: Any = Pauses(*told)
    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    said: list[str] = []
    check = OfflineCheck(
        client, scripted, answers, say=lambda line: said.append(line.plain), clock=lambda: now[-1]
    )
    check.start()
    await scripted.told_all.wait()
    yield check, said
    await check.leave()


BEING_CORRECTED = (
    Prompt(ids=[1]),
    token(1, "", "provisional"),
    Retract(start=1, stop=2, characters=0),
    token(1, "right", "verified"),
)


async def test_a_correction_counts_what_is_verified_and_says_that_the_verifier_is_away() -> None:
    """It counted the device's own tokens as if they were the verifier's, and fell back when these
    were withdrawn."""
    now = [0.0]
    answer = written_alone(Dialogue(ClientSettings()), "one")
    verified = "correcting the last answer: 1 token verified"
    async with pausing(answer, told=BEING_CORRECTED, now=now) as (check, _):
        assert check.status == verified
        now.append(3.0)
        check._take(Link(state="late"))
        check._take(token(2, " alone", "provisional"))
        assert check.status == f"{verified} · nothing new for 3 s", (
            "nothing was heard of the verifier"
        )
        check._take(Link(state="offline"))
        check._take(token(3, " still", "provisional"))
        assert check.status == f"{verified}, and the verifier is away"
        check._take(Link(state="online"))
        check._take(Retract(start=2, stop=4, characters=5))
        assert check.status == verified
        check._take(token(2, " again", "verified"))
        assert check.status == "correcting the last answer: 2 tokens verified"


async def test_a_check_that_is_cut_off_takes_back_nothing_that_was_verified() -> None:
    """An answer with a verified beginning was counted whole."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    answer.told.take(Confirm(start=1, stop=2))
    answer.told.take(token(2, " and more", "provisional"))
    answer.told.done = None
    told = (Prompt(ids=[1]), token(1, "", "provisional"), token(2, "", "provisional"))
    async with pausing(answer, told=(*told, Link(state="offline"))) as (check, _):
        assert check.unverified == 1
        assert check.status == "1 token not verified: checked when the verifier is back"


async def test_a_verifier_that_is_there_and_late_is_not_said_to_be_away() -> None:
    answer = written_alone(Dialogue(ClientSettings()), "one")
    told = (Prompt(ids=[1]), token(1, "", "provisional"), Link(state="late"))
    async with pausing(answer, told=told) as (check, _):
        assert check.status == "1 token not verified: the verifier does not get to it yet"
        assert not check.is_working
        check._take(Link(state="late", detail="the verifier refuses for now: busy"))
        assert check.status == "1 token not verified: the verifier refuses for now: busy"
        check._take(Link(state="limited", detail="your rate is used up"))
        assert check.status == "1 token not verified: your rate is used up"
        check._take(Progress(done=1, total=2))
        assert check.status == "checking the last answer: reading, 1 of 2"
        check._take(Link(state="offline"))
        assert check.status == "1 token not verified: checked when the verifier is back"


async def test_what_was_verified_before_is_counted_while_it_is_read_again() -> None:
    """ "294 of 651 tokens" stood for a quarter of a minute, and only the time of the wait moved, which
    began anew with each token that the verifier confirmed once more."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    for n in range(2, 5):
        answer.told.take(token(n, " on", "provisional"))
    answer.told.take(Confirm(start=1, stop=4))
    answer.told.done = None
    written = [token(n, "", "provisional") for n in range(1, 5)]
    now = [0.0]
    async with pausing(answer, told=(Prompt(ids=[1]), *written), now=now) as (check, _):
        line = "checking the last answer: 3 of 4 tokens"
        assert check.status == line
        now.append(5.0)
        check._take(Progress(done=1, total=1))
        assert check.status == f"{line} · nothing new for 5 s", "at work, and no further"
        check._take(Confirm(start=1, stop=2))
        again = "checking the last answer: reading, 1 of 3"
        assert check.status == again
        now.append(7.0)
        check._take(Progress(done=1, total=1))
        assert check.status == f"{again} · nothing new for 2 s"
        check._take(Confirm(start=2, stop=4))
        assert check.status == line
        check._take(Confirm(start=4, stop=5))
        assert check.status == "checking the last answer: 4 of 4 tokens"


async def test_a_correction_that_the_device_has_ended_alone_is_none() -> None:
    """Nobody had seen what it wrote then, and the conversation went on from it."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    ended = (token(2, " alone again", "provisional"), done("right alone again", verified=False))
    scripted = Scripts(*BEING_CORRECTED, Link(state="offline"), *ended)
    check, _ = await checked(scripted, answer)  # it cannot recheck, and so ends there
    assert answer.message["content"] == "alone"
    assert check.unverified == 1


async def test_an_answer_behind_a_corrected_one_is_not_verified_until_it_is_checked() -> None:
    dialogue = Dialogue(ClientSettings())
    first = written_alone(dialogue, "one")
    second = written_alone(dialogue, "two")
    second.told.take(Confirm(start=1, stop=2))
    second.told.done = done("alone")
    assert second.unverified == 0

    class PausesAtSecond(Pauses):
        async def generate(self, messages: list[Any], **how: Any) -> AsyncGenerator[Event, None]:
            if len(messages) == 1:
                events = (*BEING_CORRECTED, done("right"))
                for event in events:
                    yield event
                return
            async for event in super().generate(messages, **how):
                yield event

    scripted: Any = PausesAtSecond()
    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    check = OfflineCheck(client, scripted, [first, second], say=lambda line: None)
    check.start()
    await scripted.told_all.wait()
    assert (first.unverified, first.message["content"]) == (0, "right")
    (marked,) = check.to_save()
    assert (marked.message, marked.tokens, marked.verified_characters) == (second.message, 1, 0)
    await check.leave()


async def test_an_answer_that_is_saved_while_it_is_corrected_is_saved_as_it_was_written(
    tmp_path: Path,
) -> None:
    """The file had the beginning of the correction, and the device's text was nowhere."""
    dialogue = Dialogue(ClientSettings())
    answers = [written_alone(dialogue, "one"), written_alone(dialogue, "two")]
    for part in (" and so", " on"):
        answers[0].told.take(token(len(answers[0].told.ids) + 1, part, "provisional"))
    answers[0].message["content"] = "alone and so on"
    events = (
        Prompt(ids=[1]),
        *(token(position, "", "provisional") for position in (1, 2, 3)),
        Confirm(start=1, stop=2),
        Retract(start=2, stop=4, characters=5),
        token(2, ", as", "verified"),
        token(3, " it", "verified"),
    )
    async with pausing(*answers, told=events) as (check, said):
        dialogue.unverified = check.to_save()
        told = dialogue.take(f"/save {tmp_path / 'chat.json'}")
    assert said[-2:] == [
        "alone, as it",
        'stopped: the answer to "one" stays as this device wrote it, and 2 tokens are not verified',
    ]
    assert answers[0].message["content"] == "alone and so on"
    assert answers[0].cut_to_verified() == [2, 3]
    assert answers[0].message["content"] == "alone", "what is verified of it"
    assert isinstance(told, str)
    assert "of which 3 tokens are not verified; one is being corrected: the file has it" in told
    later = Dialogue(ClientSettings())
    loaded = later.take(f"/load {tmp_path / 'chat.json'}")
    assert isinstance(loaded, Loaded)
    assert later.messages[1]["content"] == "alone and so on"
    codec = TextCodec.of(Bundle.open(embedded_bundle()))
    one, two = (WrittenAnswer.loaded(later, mark, codec, None) for mark in loaded.unverified)
    assert one.saved.verified_characters == len("alone")
    assert one.is_wanted, "its end is asked for"
    assert two.message["content"] == "alone"


async def test_a_check_that_is_refused_takes_back_nothing_that_was_verified() -> None:
    answer = written_alone(Dialogue(ClientSettings()), "one")
    answer.told.take(Confirm(start=1, stop=2))
    answer.told.take(token(2, " and more", "provisional"))
    check, said = await checked(Scripts(then=UsageError("the prompt has 99 tokens")), answer)
    assert said == ["the last answer stays unverified: the prompt has 99 tokens"]
    assert check.unverified == 1


async def test_an_end_that_the_device_had_not_written_is_no_correction() -> None:
    """An answer that was loaded, or that the device's guard has stopped, has no end token."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    events = (
        Prompt(ids=[1]),
        token(1, "", "provisional"),
        Confirm(start=1, stop=2),
        token(2, "", "verified"),
        done("alone"),
    )
    check, said = await checked(Scripts(*events), answer)
    assert said == ["the verifier is back: the last answer is the target's own"]
    assert check.unverified == 0


@pytest.mark.parametrize("text", ["alone", "another"])
async def test_who_was_only_late_is_not_said_to_be_back(text: str) -> None:
    """Nor who was never away in this chat, because the answer was loaded."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    answer.told.was_away = False
    answer.told.take(Link(state="late"))
    kept = (token(1, "", "provisional"), Confirm(start=1, stop=2))
    replaced = (Retract(start=1, stop=2, characters=0), token(1, text, "verified"))
    events = kept if text == "alone" else (kept[0], *replaced)
    _, said = await checked(Scripts(Prompt(ids=[1]), *events, done(text)), answer)
    first = "checked: the last answer is the target's own"
    assert said[0] == (first if text == "alone" else "the verifier corrects the last answer:")


async def test_a_check_that_can_say_nothing_is_not_said_to_go_on() -> None:
    """ "checking the last answer" stood below the prompt for as long as the chat did."""
    answer = written_alone(Dialogue(ClientSettings()), "one")

    def say(line: Text) -> None:
        raise OSError("the terminal is gone")

    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    scripted: Any = Scripts(*BEING_CORRECTED, done("right"))
    check = OfflineCheck(client, scripted, [answer], say=say)
    check.start()
    assert check.task is not None
    with pytest.raises(OSError, match="terminal is gone"):
        await check.task
    assert (check.phase, check.status) == ("over", "")
    assert answer.message["content"] == "alone"


async def test_nothing_is_printed_of_the_correction_of_an_answer_that_is_gone() -> None:
    dialogue = Dialogue(ClientSettings())
    answer = written_alone(dialogue, "one")
    said: list[Text] = []
    client: Any = SimpleNamespace(link=SimpleNamespace(up=True), settings=ClientSettings())
    going_on = asyncio.Event()

    class Waiting(Scripts):
        async def generate(self, *args: Any, **how: Any) -> AsyncGenerator[Event, None]:
            async for event in super().generate(*args, **how):
                yield event
            going_on.set()
            await asyncio.Event().wait()

    events = (
        Prompt(ids=[1]),
        Retract(start=1, stop=2, characters=0),
        token(1, "right", "verified"),
    )
    conversation: Any = Waiting(*events)
    check = OfflineCheck(client, conversation, [answer], say=said.append)
    check.start()
    await going_on.wait()
    dialogue.take("/new")
    await check.leave()
    assert [text.plain for text in said] == ["the verifier is back, and corrects the last answer:"]
    assert not dialogue.messages


def test_an_answer_that_a_file_begins_with_has_a_name() -> None:
    dialogue = Dialogue(ClientSettings())
    message = dialogue.answered("Hello!")
    dialogue.take("one")
    dialogue.answered("two")
    assert WrittenAnswer(dialogue, message, AnswerSoFar()).name == "the first answer"


async def test_a_check_that_fails_says_so() -> None:
    """Its exception was lost with the task, and the status stood still."""
    answer = written_alone(Dialogue(ClientSettings()), "one")
    check, said = await checked(Scripted(), answer, is_latest_turn=True)
    assert said == [
        "the last answer stays unverified: the check failed: ZeroDivisionError: by zero"
    ]
    assert check.status == ""


def test_an_answer_that_is_gone_has_a_name_until_its_check_has_ended() -> None:
    dialogue = Dialogue(ClientSettings())
    answer = written_alone(dialogue, "one")
    written_alone(dialogue, "two")
    assert answer.name == 'the answer to "one"'
    dialogue.take("/new")
    dialogue.take("three")
    assert answer.name == "an earlier answer"


async def test_a_stopped_answer_is_not_checked_and_nobody_is_told_that_it_will_be() -> None:
    answer = written_alone(Dialogue(ClientSettings()), "one")
    answer.is_wanted = False
    check, said = await checked(Scripted(), answer)
    assert (check.status, said) == ("", [])
    assert check.unverified == 1
