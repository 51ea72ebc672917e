"""EAGLE's alignment: what is drafted step by step, from committed rows, is what training computes
in one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.registry import Feature, FeatureDrafter
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.contract import DraftRequest
from moa.drafters.drafting import Level
from moa.drafters.features import FeatureDrafting
from moa.drafters.states.training import chains, shifted, visible
from moa.model.blocks import additive
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Target
from moa.training.teacher import Teacher
from moa.tree import TreeGrower, TreeShape
from tests.benchmarks.pairs import KINDS, baseline, body, prompts, target_for, tiny_target, whole

KNOWN = 9
"""Tokens that the target has run; the next is pending."""


def build(kind: Feature) -> tuple[FeatureDrafter, list[int], Tensor, FeatureDrafting, int]:
    """A drafter, a text, the target's true features of it, computed apart from the engine, and a
    slot that has seen the text's beginning."""
    ids = prompts(14)[0]
    teacher = Teacher(tiny_target())
    target = target_for(kind, tiny_target())
    model = baseline(kind, target)
    if model.config.taps:
        teacher.tap(model.config.taps)
    states = teacher(whole(ids)).states
    drafting = FeatureDrafting(model, slots=2, capacity=64)
    with torch.inference_mode():
        return model, ids, model.read(states), drafting, observed(target, drafting, ids)


def observed(target: Target, drafting: FeatureDrafting | BodyDrafting, ids: list[int]) -> int:
    """A slot that has seen the first tokens as an engine shows them: a chunk, then an accepted path
    of a tree."""
    slot = target.cache.acquire()
    drafter_slot = drafting.open()
    step = target.forward([Row.chain(slot, ids[:6])])
    drafting.observe(drafter_slot, ids[:6], target.commit(step, 0, range(6)))
    wrong = [(token + 1) % 100 + 4 for token in ids[6:KNOWN]]
    tree = Row(slot, [ids[6], wrong[0], ids[7], wrong[1], ids[8]], [-1, 0, 0, 1, 2])
    step = target.forward([tree])
    drafting.observe(drafter_slot, ids[6:KNOWN], target.commit(step, 0, [0, 2, 4]))
    return drafter_slot


def levels(drafting: Any, slot: int, ids: list[int], truth: Tensor | None) -> list[Tensor]:
    """Logits of a chain forced along the true tokens; `truth` replaces each drafted feature by the
    true one."""
    request = DraftRequest(slot, ids[KNOWN], TreeShape.chain(4), SamplingSettings())
    grower = TreeGrower(ids[KNOWN], request.shape)
    found = []
    for at in range(KNOWN, KNOWN + 4):
        found.append(
            drafting.logits(Level([request], [grower], drafting.pool, drafting.device))[0, 0]
        )
        if truth is not None:
            drafting._drafted[slot][-1] = truth[0, at]
        grower.expand(torch.tensor([[ids[at + 1]]]).numpy(), torch.zeros(1, 1).numpy())
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafting_on_true_features_is_the_forward_of_training(kind: Feature) -> None:
    model, ids, features, drafting, slot = build(kind)
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    causal = additive(visible(model, positions, torch.ones_like(tokens))).unsqueeze(1)
    hidden, _ = model.step(
        tokens, shifted(features, positions), positions, causal, model.empty_rows(tokens)
    )
    wanted = model.logits(hidden)[0]
    for at, logits in enumerate(levels(drafting, slot, ids, features), start=KNOWN):
        torch.testing.assert_close(logits, wanted[at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "states"])
@torch.inference_mode()
def test_the_training_time_test_is_what_drafting_does(kind: Feature) -> None:
    model, ids, features, drafting, slot = build(kind)
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    fed = shifted(features, positions)
    steps = chains(model, tokens, positions, torch.ones_like(tokens), fed, KNOWN, 4)
    wanted = [
        model.logits(hidden)[0, at[0].tolist().index(KNOWN + lag)] for lag, hidden, at, _ in steps
    ]
    for found, expected in zip(levels(drafting, slot, ids, None), wanted, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_drafter_without_records_is_a_plain_llama_and_drafts_as_one() -> None:
    target = target_for("independent", tiny_target())
    ids = prompts(14)[0]
    model = body(target)
    tokens = torch.tensor([ids])
    causal = additive(torch.ones(1, 1, 14, 14, dtype=torch.bool).tril())
    wanted = model.logits(
        model.features(tokens, torch.arange(14)[None], causal, model.empty_rows(tokens))[0]
    )[0]
    llama: Any = as_llama(model, 512, (2,))
    torch.testing.assert_close(llama(tokens).logits[0], wanted, atol=1e-4, rtol=1e-4)
    drafting = BodyDrafting(model, slots=2, capacity=64)
    for at, logits in enumerate(
        levels(drafting, observed(target, drafting, ids), ids, None), start=KNOWN
    ):
        torch.testing.assert_close(logits, wanted[at], atol=1e-4, rtol=1e-4)


def test_features_do_not_cross_documents() -> None:
    before = shifted(torch.arange(1.0, 7.0).view(1, 6, 1), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert before.flatten().tolist() == [0, 1, 2, 0, 4, 5]


def test_chains_stay_in_their_document() -> None:
    model, ids, features, *_ = build("eagle3")
    segments = torch.tensor([[1] * 7 + [2] * 7])
    positions = torch.tensor([[*range(7), *range(7)]])
    tokens = torch.tensor([ids])
    for lag, _, at, valid in chains(
        model, tokens, positions, segments, shifted(features, positions), 2, 4
    ):
        if lag:
            inside = [
                place for place, good in zip(at[0].tolist(), valid[0].tolist(), strict=True) if good
            ]
            assert inside == [2 + lag, 10 + lag], "the chain from token 6 leaves its document"
