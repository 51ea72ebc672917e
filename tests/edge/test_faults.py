"""Faults inside the device: each part of a turn raises, hangs or returns nonsense, from one of its
calls on.

A turn beside it on the same client is not touched, the faulty one ends soon, and it says what is
wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import Notice, Token
from edge_client.turn import step_thread, worker
from moa.errors import MoaError, NumericalError
from moa.speculation.guess_tree import GuessTreeGrower
from moa.tree import DraftTree
from tests.edge import kit
from tests.verifier import kit as verifier_kit

COUNT = 12
IDS = verifier_kit.prompt(7, 12)
OTHER = verifier_kit.prompt(8, 9)
FAULTY: ContextVar[bool] = ContextVar("FAULTY", default=False)
"""Whether the turn of this task is the one with the fault."""
Fault = Callable[[], Any]
STUCK = threading.Event()
"""Set at the end of a test: lets a hanging step go."""


def raises(error: type[Exception]) -> Fault:
    def fault() -> Any:
        raise error("as the test has it")

    return fault


def steps(
    result: Any = None, error: type[Exception] | None = None, *, hangs: bool = False
) -> Fault:
    """A drafter's work that ends so."""

    def work() -> Generator[None, None, Any]:
        yield
        if hangs:
            STUCK.wait(60)
        if error is not None:
            raise error("as the test has it")
        return result

    return work


def growth(*tokens: int, score: float = -1.0) -> GuessTreeGrower:
    grown = GuessTreeGrower(tokens[0])
    grown.expand([0], [list(tokens[1:])], [[score] * (len(tokens) - 1)])
    return grown


def no_tree() -> GuessTreeGrower:
    grown = growth(IDS[-1], 2)
    grown.tree = DraftTree([IDS[-1], 2], [-1, 7], [0.0, -1.0])
    return grown


RAISED: dict[str, Fault] = {
    "raises": raises(RuntimeError),
    "has no memory": raises(MemoryError),
    "raises in a step": steps(error=ValueError),
    "computes NaN": steps(error=NumericalError),
    "returns nothing": steps(None),
    "hangs": steps(hangs=True),
}
DRAFTER = {
    "grow": RAISED
    | {
        "another text": steps(growth(1, 2)),
        "no tree": steps(no_tree()),
        "empty": steps(growth(IDS[-1])),
    },
    "guess": RAISED | {"no token": steps(-1), "a large token": steps(2**31), "a text": steps("x")},
}


async def turn(
    conversation: Conversation, ids: list[int], *, faulty: bool
) -> kit.Reader | MoaError:
    FAULTY.set(faulty)
    try:
        return await kit.transcribe(conversation, ids)
    except MoaError as error:
        return error


def checked(outcome: kit.Reader | MoaError, ids: list[int]) -> str:
    """What the user was told; verified text is the target's."""
    if isinstance(outcome, MoaError):
        return outcome.line()
    assert outcome.done is not None
    truth = verifier_kit.generated(ids, COUNT)
    right = [
        token for token, verified in zip(outcome.tokens, outcome.verified, strict=True) if verified
    ]
    assert right == truth[: len(right)]
    assert outcome.done.verified == (outcome.tokens == truth and all(outcome.verified))
    return " ".join(event.message for event in outcome.events if isinstance(event, Notice))


class NotReachedError(AssertionError):
    """A function was not called as often as its fault needs."""


async def beside(
    client: EdgeClient, path: str, at: int, fault: Fault, *, apart: bool = False
) -> tuple[kit.Reader | MoaError, str]:
    """A turn in which a function below its conversation has this fault from its `at`th call on, and
    one beside it, which must not notice; the outcome, and what was said."""
    async with client.conversation() as faulty, client.conversation() as other, asyncio.timeout(60):
        owner = attrgetter(path.rpartition(".")[0])(faulty)
        name = path.rpartition(".")[2]
        real = getattr(owner, name)
        calls = 0

        def injected(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += FAULTY.get()
            return fault() if FAULTY.get() and calls >= at else real(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, injected)
            turns = [
                turn(faulty, IDS, faulty=True),
                *([] if apart else [turn(other, OTHER, faulty=False)]),
            ]
            outcome, *rest = await asyncio.gather(*map(asyncio.create_task, turns))
        if calls < at:
            raise NotReachedError(f"the fault was not reached: {calls} of {at}")
        for one in rest:
            assert isinstance(one, kit.Reader)
            assert one.tokens == verifier_kit.generated(OTHER, COUNT)
            assert all(one.verified)
        return outcome, checked(outcome, IDS)


def open_client(url: str, **settings: Any) -> EdgeClient:
    how: dict[str, Any] = {"max_new_tokens": COUNT, "offline_after": 5.0, "draft": "device"}
    how["settle_seconds"] = 30.0 if url else 0.5
    device = kit.oracle([*IDS, *verifier_kit.generated(IDS, COUNT)], 0.3)
    device = dataclasses.replace(device, thread=step_thread.StepThread())
    return EdgeClient(device=device, verifier=url, **(how | settings))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(step_thread, "STUCK", 0.3)
    monkeypatch.setattr("edge_client.link.websocket._SEND_SECONDS", 0.3)
    STUCK.clear()
    yield
    STUCK.set()


@pytest.mark.parametrize(
    ("part", "fault"), [(part, fault) for part in DRAFTER for fault in DRAFTER[part]]
)
async def test_a_drafter_that_fails(part: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier drafts the rest; offline, the turn ends. The conversation goes on with another
    drafter."""
    offline = part == "guess"
    async with kit.verifier() as running:
        for at in (1, 3):
            async with open_client("" if offline else running.transport.url) as client:
                if fault == "hangs":
                    monkeypatch.setattr(worker, "BLOCKING", -1.0)  # all steps run in the thread
                STUCK.clear()
                outcome, said = await beside(
                    client, f"drafter.{part}", at, DRAFTER[part][fault], apart=offline
                )
                STUCK.set()
                assert isinstance(outcome, kit.Reader)
                assert "the drafter" in said
                assert offline or all(outcome.verified)
                assert len(outcome.tokens) == (at - 1 if offline else COUNT)


DECODER = "_shared.device.codec.decode"
LINK = "_shared.link._connection.send"


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        pytest.param(DECODER, raises(RuntimeError), id="decoder raises"),
        pytest.param(DECODER, lambda: None, id="decoder returns nothing"),
        pytest.param(DECODER, raises(MemoryError), id="decoder has no memory"),
        pytest.param(LINK, raises(RuntimeError), id="link raises"),
        pytest.param(LINK, raises(OSError), id="link breaks"),
        pytest.param(LINK, partial(asyncio.sleep, 60), id="link hangs"),
    ],
)
async def test_a_part_of_the_shell_that_fails(part: str, fault: Fault) -> None:
    """A link is replaced, and the text is exact; of anything else the user gets one line."""
    async with kit.verifier() as running:
        for at in (1, 3):
            async with open_client(running.transport.url, reconnect_seconds=0.05) as client:
                await client.wait_online()
                outcome, said = await beside(client, part, at, fault)
                if part == LINK:
                    assert isinstance(outcome, kit.Reader)
                    assert all(outcome.verified)
                else:
                    assert isinstance(outcome, MoaError)
                    assert "failed" in said
                async with client.conversation() as again:  # nothing is left behind
                    assert (await kit.transcribe(again, IDS)).tokens == verifier_kit.generated(
                        IDS, COUNT
                    )


async def reached(
    client: EdgeClient, path: str, at: int, fault: Fault
) -> tuple[kit.Reader | MoaError, str]:
    """As `beside`, of a function that a busy machine may not come to within an answer: records wait
    for text, and those that are not there at its end are not sent."""
    for _ in range(9):
        with contextlib.suppress(NotReachedError):
            return await beside(client, path, at, fault)
    return await beside(client, path, at, fault)


async def test_records_that_cannot_be_stored_cost_no_token() -> None:
    async with kit.verifier() as running:
        for at in (1, 2):  # a quick verifier sends the records of the whole answer in two messages
            async with open_client(running.transport.url) as client:
                outcome, said = await reached(client, "records.buffer.put", at, raises(MemoryError))
                assert isinstance(outcome, kit.Reader)
                assert all(outcome.verified)
                assert "activation records" in said


@pytest.mark.parametrize("name", ["_encode", "chat"])
async def test_a_prompt_that_cannot_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError, MemoryError, UnicodeError):
        async with open_client("") as client:
            monkeypatch.setattr(client.device.codec, name, raises(error))
            async with client.conversation() as conversation:
                prompt: Any = "x" if name == "_encode" else [{"role": "user", "content": "x"}]
                with pytest.raises(MoaError, match="failed"):
                    await anext(conversation.generate(prompt))


async def test_a_device_without_a_drafter_says_so() -> None:
    async with open_client("") as client:
        client.shared.device = dataclasses.replace(client.device, new_drafter=raises(RuntimeError))
        with pytest.raises(MoaError, match="the drafter failed"):
            client.conversation()


async def test_a_thread_that_takes_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kit.verifier() as running, open_client(running.transport.url) as client:
        monkeypatch.setattr(worker, "BLOCKING", -1.0)
        client.device.thread.shutdown()
        outcome = await turn(client.conversation(), IDS, faulty=True)
        assert "the drafter failed" in checked(outcome, IDS)
        assert isinstance(outcome, kit.Reader)
        assert all(outcome.verified)


async def read(conversation: Conversation, most: int) -> None:
    """Read so many tokens, and fail."""
    tokens = itertools.count(1)
    async for event in conversation.generate(ids=IDS):
        if isinstance(event, Token) and next(tokens) == most:
            raise ZeroDivisionError


async def test_a_reader_who_fails_leaves_nothing_behind() -> None:
    """The exception is the reader's own; the client goes on."""
    async with (
        kit.verifier() as running,
        open_client(running.transport.url) as client,
        asyncio.timeout(60),
    ):
        for at in range(1, 9):
            async with client.conversation() as conversation:
                with pytest.raises(ZeroDivisionError):
                    await read(conversation, at)
        outcome = await kit.transcribe(client.conversation(), IDS)
        assert outcome.tokens == verifier_kit.generated(IDS, COUNT)
