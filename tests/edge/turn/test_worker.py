"""The end of a turn whose drafter is still at work in the device's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edge_client.turn import worker as module
from edge_client.turn.actions import Write
from edge_client.turn.controller import Controller
from edge_client.turn.worker import DrafterWorker
from moa.sampling import SamplingSettings
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
        assert await worker.run(Write([1])) is None
        await worker.finish()
    finally:
        over.set()
    assert other.result(PATIENCE)
    assert not worker.failed
    while await worker.run(Write([1])) is None:
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
    assert await worker.run(Write([1])) is None
    await worker.finish()
    assert told.is_set()
    assert worker.failed is (how == "it fails")
