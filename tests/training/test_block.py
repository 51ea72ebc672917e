"""Training for drafts in one pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moa.config import DrafterConfig
from moa.errors import ConfigError
from moa.model.checkpoint import new_drafter
from moa.model.loading import load_model
from moa.training.block import BlockRule, MaskBlocks
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.teacher import Teacher


def test_masks_see_their_own_document_alone() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 2]])
    positions = np.array([[0, 1, 2, 0, 1, 2]])
    batch = Batch(segments, segments, positions, segments > 0, np.zeros(1, np.int64))
    blocks = MaskBlocks(np.array([[4, 4, 1]]), np.array([1, 2, 1]))
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril() & torch.from_numpy(segments[:, :, None] == segments[:, None])
    seen = blocks.seen(causal)[0]
    assert seen[6].nonzero().flatten().tolist() == [3, 4, 6]
    assert seen[7].nonzero().flatten().tolist() == [3, 4, 6, 7]
    assert seen[8].nonzero().flatten().tolist() == [0, 1, 8]
    assert not seen[:6, 6:].any()
    assert blocks.positions(batch).tolist() == [[2, 3, 2]]
    assert blocks.ids.tolist() == [[-1, -2, -1]]


def test_a_mask_counts_while_its_next_token_is_wanted_and_in_the_document() -> None:
    segments = np.array([[1, 1, 1, 1, 2, 2, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2]])
    wanted = np.array([[False, True, True, True, True, True, True]])
    batch = Batch(segments, segments, positions, wanted, np.zeros(1, np.int64))
    blocks = MaskBlocks(np.array([[0, 0, 2, 4, 5]]), np.array([1, 3, 1, 1, 1]))
    assert blocks.counted(batch).tolist() == [[True, False, False, False, False]]


def learner(target: Path, rule: BlockRule | None = None, **shape) -> Distillation:
    loaded = load_model(target)
    torch.manual_seed(0)
    drafter = new_drafter(DrafterConfig.for_target(loaded.facts, **shape), loaded.model)
    return Distillation(drafter, Teacher(loaded.model), DistillSettings(blocks=rule or BlockRule()))


@pytest.mark.parametrize("shape", [{}, {"tli": 1}, {"layers": 2, "cross_attention_after": (1,)}, {"use_ca": False}])
def test_masks_are_learnt_beside_the_tokens_and_change_nothing_of_them(
    target: Path, batch: Batch, shape: dict[str, int]
) -> None:
    task, plain = learner(target, block=6, **shape), learner(target, **shape)
    plain.module.load_state_dict(task.module.state_dict(), strict=False)
    both, tokens = task.loss(batch, 3, 0.0), plain.loss(batch, 3, 0.0)
    assert both.weight == tokens.weight
    torch.testing.assert_close(both.shown["agree"], tokens.shown["agree"])
    assert 0 <= float(both.shown["block_agree"] / both.weight) <= 1
    both.total.backward()
    gradients = {name: p.grad for name, p in task.module.named_parameters() if name.startswith("block_head.")}
    assert len(gradients) == 4
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())
    light = learner(target, BlockRule(weight=1e-9), block=6, **shape).loss(batch, 3, 0.0)
    torch.testing.assert_close(light.total, tokens.total, rtol=1e-4, atol=1e-4)


def test_as_many_masks_as_the_rule_says(batch: Batch) -> None:
    blocks = MaskBlocks.draw(batch, 0, 0, block=4, share=0.5, kept=0.5)
    length = batch.ids.shape[1]
    counts = np.bincount(blocks.places, minlength=4)
    assert counts.tolist() == [0, round(length / 2), round(length / 4), round(length / 8)]
    for row in blocks.anchors:
        per_anchor = {(a, p) for a, p in zip(row, blocks.places, strict=True)}
        assert len(per_anchor) == len(row), "no mask twice"
        assert all((a, p - 1) in per_anchor for a, p in per_anchor if p > 1), "a far mask has the nearer ones"
    none = MaskBlocks.draw(batch, 0, 0, block=0, share=0.5, kept=0.5)
    assert none.ids.shape == (len(batch.ids), 0)


@pytest.mark.parametrize("bad", [{"share": 0.0}, {"kept": 1.5}, {"unpaired": 1.0}, {"weight": 0.0}])
def test_rules_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="blocks"):
        BlockRule(**bad)
