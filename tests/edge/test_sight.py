"""A draft waits for the records of its prompt if they are about to arrive, and not otherwise."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.tools.emulated_network import Condition, Profile
from edge_client.turn.actions import Draft
from edge_client.turn.controller import Controller
from edge_client.turn.records import Records
from edge_client.turn.worker import DrafterWorker
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Step
from moa.tree import DraftTree, TreeShape
from moa.wire.messages import ServerMessage, Verdict
from tests.edge import kit
from tests.edge.test_exact import truth
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(2, 40)
FAR = Profile(((0.0, Condition(rtt_ms=300.0)),))


async def drafts(
    monkeypatch: pytest.MonkeyPatch, *, records: bool = True
) -> tuple[list[bool], float]:
    """Whether each draft of an answer had the records, and the seconds from the first verdict to
    the draft after it."""
    text = truth(IDS)
    saw = list[bool]()
    began = list[float]()
    device = kit.oracle([*IDS, *text], 0.6)
    drafter: Any = device.new_drafter()
    draft = drafter.draft

    def watched(ids: Sequence[int], *how: Any) -> Generator[None, None, DraftTree]:
        if len(ids) >= len(IDS):
            began.append(time.perf_counter())
            saw.append(drafter.records.held.newest_missing(len(IDS), 1) is None)
        return draft(ids, *how)

    drafter.draft = watched
    device = dataclasses.replace(device, new_drafter=lambda: drafter)
    how = {"draft": "device", "guess_ahead": False, "max_new_tokens": 12, "offline_after": 60.0}
    async with kit.linked(device, FAR, drafter=records, **how) as (client, _, _):
        assert client.link is not None
        real = client.link.deliver
        verdicts = []

        def deliver(arrived: float, message: ServerMessage, size: int) -> None:
            verdicts.extend([arrived] if isinstance(message, Verdict) else [])
            real(arrived, message, size)

        monkeypatch.setattr(client.link, "deliver", deliver)
        transcript = await kit.transcribe(client, IDS)
    assert transcript.tokens == text[:12]
    assert all(transcript.verified)
    return saw, next(at for at in began if at > verdicts[0]) - verdicts[0]


async def test_all_drafts_but_the_first_see_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    saw, _ = await drafts(monkeypatch)
    assert len(saw) > 2
    assert saw == [False] + [True] * (len(saw) - 1)


@pytest.mark.parametrize(("made", "least", "most"), [(True, 0.1, 0.6), (False, 0.0, 0.1)])
async def test_records_that_never_come_are_waited_for_half_a_round_and_where_none_are_made_not_at_all(
    made: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Records, "keep", lambda *_: None)
    saw, waited = await drafts(monkeypatch, records=made)
    assert not any(saw)
    assert least <= waited < most


async def test_the_prompt_of_a_first_verdict_is_no_part_of_a_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dataclasses.replace(verifier_kit.SETTINGS, prefill_tokens=10)
    how = {"draft": "device", "guess_ahead": False, "max_new_tokens": 1}
    async with kit.linked(kit.oracle(IDS), settings=settings, **how) as (client, running, _):
        real = running.engine.target.forward
        ends = []

        def slow(rows: Sequence[Row]) -> Step:
            time.sleep(0.1)
            step = real(rows)
            ends.append(time.perf_counter())
            return step

        monkeypatch.setattr(running.engine.target, "forward", slow)
        await kit.transcribe(client, IDS)
        four_pieces = ends[-1] - ends[0]
        assert 0.1 <= client.shared.controller.forward.seconds(1) < four_pieces, (
            "each of them took as long"
        )


async def test_a_piece_of_a_prompt_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    device = kit.device()
    steps = []
    monkeypatch.setattr(controller.step, "observe", lambda width, seconds: steps.append(width))
    worker = DrafterWorker(device.new_drafter(), SamplingSettings(), controller, device.thread)
    draft = Draft(IDS, TreeShape.chain(3, min_score=-1e9), quick=False)
    while await worker.run(draft) is None:
        pass
    assert steps == [1, 1]


async def test_a_client_knows_from_the_start_what_a_step_takes() -> None:
    async with EdgeClient(device=kit.device(), offline=True) as client:
        step = client.shared.controller.step
        assert step, "measured"
        assert 0 < step.seconds(1) <= step.seconds(4) < 1
