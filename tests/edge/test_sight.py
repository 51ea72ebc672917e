"""What a client measures of its drafter and of the verifier."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest

from edge_client.client import EdgeClient
from edge_client.link.mailbox import Mailbox
from edge_client.turn.actions import Grow
from edge_client.turn.controller import Controller
from edge_client.turn.worker import DrafterWorker
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Step
from tests.edge import kit
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(2, 40)


async def test_the_prompt_of_a_first_answer_is_no_part_of_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dataclasses.replace(verifier_kit.SETTINGS, prefill_tokens=10)
    how = {"draft": "device", "guess_ahead": False, "max_new_tokens": 1}
    async with kit.linked(kit.oracle(IDS), settings=settings, **how) as (client, running, _):
        real = running.engine.target.forward
        ends = []

        def slow(rows: Sequence[Row]) -> Step:
            # Pieces that take so long that no busy machine makes the last forward of it.
            time.sleep(0.1 if len(ends) == 3 else 0.7)
            step = real(rows)
            ends.append(time.perf_counter())
            return step

        monkeypatch.setattr(running.engine.target, "forward", slow)
        await kit.transcribe(client, IDS)
        four_pieces = ends[-1] - ends[0]
        assert 0.1 <= client.shared.controller.forward.seconds(1) < four_pieces, (
            "the last one alone, and none of the prompt's"
        )


async def test_a_piece_of_a_prompt_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    device = kit.device()
    steps = []
    monkeypatch.setattr(controller.step, "observe", lambda width, seconds: steps.append(width))
    worker = DrafterWorker(device.new_drafter(), SamplingSettings(), controller, device.thread)
    for _ in range(2):
        while await worker.run(Grow(IDS, 1, -1e9), Mailbox()) is None:
            pass
    assert steps == [1]


async def test_a_client_knows_from_the_start_what_a_step_takes() -> None:
    async with EdgeClient(device=kit.device(), offline=True) as client:
        step = client.shared.controller.step
        assert step, "measured"
        assert 0 < step.seconds(1) <= step.seconds(4) < 1
