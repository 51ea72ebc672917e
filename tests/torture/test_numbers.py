"""NaN and infinities on either end cost acceptance, or one session, and never change a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edge_client.client import EdgeClient
from moa.drafters.attention.model import AttentionDrafter
from moa.graph.step import Call
from moa.target.torch_target import Step, Target
from tests.edge import kit
from tests.edge.test_exact import COUNT, truth
from tests.verifier import kit as verifier_kit

IDS = verifier_kit.prompt(0, 12)
POISON = 77
"""A token that the tests' texts do not hold."""


def assert_right(transcript: kit.Reader) -> None:
    assert transcript.tokens == truth(IDS)
    assert all(transcript.verified)


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_a_drafter_without_numbers_costs_acceptance_and_no_token(
    monkeypatch: pytest.MonkeyPatch, draft: Any
) -> None:
    ran = Call.run
    projected = AttentionDrafter.project

    def run(call: Call, noise: np.ndarray) -> float:
        seconds = ran(call, noise)
        for array in (call.top_logp, *call.rows):
            array.fill(np.nan)
        return seconds

    def project(drafter: AttentionDrafter, *given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full_like(one, torch.nan) for one in projected(drafter, *given))

    monkeypatch.setattr(Call, "run", run)  # the device's
    monkeypatch.setattr(AttentionDrafter, "project", project)  # the server's, and all records
    async with kit.verifier() as running:
        url = running.transport.url
        async with EdgeClient(
            verifier=url, device=kit.device(), draft=draft, max_new_tokens=COUNT
        ) as client:
            assert_right(await kit.transcribe(client, IDS))


async def test_a_target_without_numbers_ends_that_answer_with_a_word_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Target.forward

    def broken(target: Target, rows: Any) -> Step:
        step = forward(target, rows)
        for b, row in enumerate(rows):
            if POISON in row.tokens:
                with torch.inference_mode():  # these are tensors of inference
                    step.hidden(b).fill_(torch.nan)
        return step

    monkeypatch.setattr(Target, "forward", broken)
    settings: dict[str, Any] = {
        "draft": "none",
        "max_new_tokens": COUNT,
        "settle_seconds": 0.1,
        "offline_after": 5.0,
    }
    async with kit.verifier() as running:
        url = running.transport.url
        async with (
            EdgeClient(verifier=url, device=kit.device(), **settings) as good,
            EdgeClient(verifier=url, device=kit.device(), **settings) as bad,
        ):
            wrong = await kit.transcribe(bad, [*IDS[:-1], POISON])
            assert wrong.done is not None
            assert not wrong.done.verified
            assert not any(wrong.verified)
            assert bad.link is not None
            assert bad.link.connections == 1, "nothing is wrong with the connection"
            assert_right(await kit.transcribe(good, IDS))
        assert 1 <= verifier_kit.metric(running, "moa_quarantined_sessions_total") <= 10
