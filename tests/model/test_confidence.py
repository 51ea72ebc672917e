"""The learned confidence in a guess limits how far a tree grows."""

from __future__ import annotations

import torch

from moa.config import DrafterConfig
from moa.model.checkpoint import new_drafter
from moa.model.drafting import MoaDrafting, recalibrated
from moa.model.generate import GenerationSettings, Speculator
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from tests.tiny import tiny


def test_the_best_guess_is_as_likely_as_the_head_says() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    found = recalibrated(scores, torch.tensor([0.9, 0.4]).log()).exp()
    torch.testing.assert_close(found, torch.tensor([[0.9, 0.06, 0.04], [0.05, 0.05, 0.4]]))


def _drafted(bias: float, sampling: SamplingSettings) -> tuple[list[int], int]:
    torch.manual_seed(0)
    target = Target.from_model(tiny("llama"), capacity=64)
    drafter = new_drafter(DrafterConfig.for_target(target.facts, confidence=True), target.model).eval()
    torch.nn.init.zeros_(drafter.confidence_head.weight)
    torch.nn.init.constant_(drafter.confidence_head.bias, bias)
    settings = GenerationSettings(
        max_new_tokens=8, sampling=sampling, shape=TreeShape.chain(6), ignore_eos=True, adapt=False
    )
    (out,) = Speculator(target, MoaDrafting(drafter, capacity=64)).generate([[5, 6, 7]], settings)
    return out.ids, out.drafted


def test_little_confidence_stops_a_draft_early_and_changes_no_text() -> None:
    greedy = SamplingSettings()
    sure, doubtful = _drafted(8.0, greedy), _drafted(-15.0, greedy)
    assert sure[0] == doubtful[0]
    assert doubtful[1] < sure[1]


def test_confidence_says_nothing_of_sampled_tokens() -> None:
    sampled = SamplingSettings(temperature=1.0, seed=3)
    assert _drafted(8.0, sampled) == _drafted(-15.0, sampled)
