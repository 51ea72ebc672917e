"""The end of a turn whose drafter is still at work in the device's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from edge_client.link.mailbox import Mailbox
from edge_client.turn import worker as module
from edge_client.turn.actions import Write
from edge_client.turn.controller import Controller
from edge_client.turn.worker import DrafterWorker
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
