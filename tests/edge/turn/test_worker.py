"""A drafter at work in the device's thread: when a step of it hangs, and the end of a turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from edge_client.link.mailbox import Mailbox
from edge_client.turn import step_thread
from edge_client.turn import worker as module
from edge_client.turn.actions import Write
from edge_client.turn.controller import Controller
from edge_client.turn.step_thread import StepThread
from edge_client.turn.worker import DrafterWorker
from moa.errors import DeviceError
from moa.sampling import SamplingSettings
from moa.wire import messages as m
from tests.edge import kit

PATIENCE = 60.0


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> DrafterWorker:
    """One whose steps all run in the thread, and whose end of a turn waits for none of them."""
    monkeypatch.setattr(module, "BLOCKING", -1.0)
    monkeypatch.setattr(module, "_UNWANTED_SECONDS", 0.05)
    device = kit.device()
    return DrafterWorker(device.new_drafter(), SamplingSettings(), Controller(), device.thread)


async def test_a_step_behind_those_of_other_conversations_is_taken_back(
    worker: DrafterWorker,
) -> None:
    over = threading.Event()
    other = worker.thread.submit(over.wait, PATIENCE)
    try:
        assert await worker.run(Write([1]), Mailbox()) is None
        await worker.finish()
    finally:
        over.set()
    assert other.result(PATIENCE)
    assert not worker.failed
    while await worker.run(Write([1]), Mailbox()) is None:
        pass


async def test_a_message_does_not_wait_for_a_step(
    worker: DrafterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", PATIENCE)
    over = threading.Event()
    box = Mailbox()

    def steps(*_: object) -> Iterator[None]:
        assert over.wait(PATIENCE)
        yield

    monkeypatch.setattr(worker.drafter, "guess", steps)
    asyncio.get_running_loop().call_soon(box.put, 0.0, m.Goaway(reason="restart"), 1)
    try:
        async with asyncio.timeout(PATIENCE / 2):
            assert await worker.run(Write([1]), box) is None
        assert box.messages
    finally:
        over.set()
    await worker.finish()


async def test_a_step_that_ends_is_not_kept_waiting_for_a_message(
    worker: DrafterWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", PATIENCE)
    box = Mailbox()
    async with asyncio.timeout(PATIENCE / 2):
        while await worker.run(Write([1]), box) is None:
            pass


@pytest.mark.parametrize("how", ["it fails", "it comes to its end"])
async def test_a_step_that_runs_is_ended(
    worker: DrafterWorker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    told = threading.Event()

    def steps(*_: object) -> Iterator[None]:
        assert told.wait(PATIENCE)
        if how == "it fails":
            raise RuntimeError("ended")
        yield

    monkeypatch.setattr(worker.drafter, "guess", steps)
    monkeypatch.setattr(worker.drafter, "end_steps", told.set)
    assert await worker.run(Write([1]), Mailbox()) is None
    await worker.finish()
    assert told.is_set()
    assert worker.failed is (how == "it fails")


class Clock:
    """The time as the worker and its thread see it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "perf_counter", made)
    monkeypatch.setattr(step_thread, "perf_counter", made)
    return made


@asynccontextmanager
async def reading(
    worker: DrafterWorker, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> AsyncIterator[Write]:
    """The worker's thread runs a step over so many tokens, until the body ends."""
    begun = threading.Event()
    over = threading.Event()

    def steps(*_: object) -> Iterator[None]:
        begun.set()
        assert over.wait(PATIENCE)
        yield

    monkeypatch.setattr(worker.drafter, "guess", steps)
    action = Write([1] * tokens)
    try:
        assert await worker.run(action, Mailbox()) is None
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        yield action
    finally:
        over.set()


@pytest.mark.parametrize(
    ("tokens", "token_seconds", "longest"),
    [
        pytest.param(64, 0.1, 128.0, id="a piece by the speed of the one before"),
        pytest.param(1000, 0.1, 128.0, id="a piece of a longer text has no more tokens"),
        pytest.param(60, 0.0, 36.0, id="the first piece by the steps over one token"),
        pytest.param(1, 0.0, 30.0, id="a step of a draft"),
    ],
)
async def test_a_step_hangs_when_it_takes_many_times_what_its_tokens_usually_take(
    worker: DrafterWorker,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    tokens: int,
    token_seconds: float,
    longest: float,
) -> None:
    for _ in range(50):  # until nothing is left of what is assumed before
        worker.controller.step.observe(1, 0.03)
    worker.controller.piece_token = token_seconds
    async with reading(worker, monkeypatch, tokens) as action:
        clock.now = 0.98 * longest
        assert await worker.run(action, Mailbox()) is None
        clock.now = 1.02 * longest
        with pytest.raises(DeviceError, match="the drafter hangs: a step has taken"):
            await worker.run(action, Mailbox())


async def test_a_step_that_waits_for_its_turn_does_not_hang(
    worker: DrafterWorker, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Other conversations read long texts in the same thread."""
    over = threading.Event()
    begun = threading.Event()

    def other() -> bool:
        begun.set()
        return over.wait(PATIENCE)

    slow = worker.thread.run_step(other, 10.0)
    try:
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        assert await worker.run(Write([1]), Mailbox()) is None
        clock.now = 190.0
        assert await worker.run(Write([1]), Mailbox()) is None
        clock.now = 210.0
        with pytest.raises(DeviceError, match="has taken 210 s"):  # the other one hangs
            await worker.run(Write([1]), Mailbox())
    finally:
        over.set()
    assert slow.result(PATIENCE)


def test_between_two_steps_nothing_hangs() -> None:
    thread = StepThread()
    assert thread.run_step(lambda: True, 0.0).result(PATIENCE)
    thread.shutdown()
    assert not thread.stuck_for(1e9)
