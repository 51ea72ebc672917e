"""The drafters without records: as a plain Llama, and one pass over a block as training computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.pard import BLOCK, KEPT, MASK, Pard, PardDrafting, PardTraining
from moa.model.drafting import DraftRequest, Level, MoaDrafting
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings
from moa.training.block import MaskBlocks
from moa.training.data import Batch
from moa.training.distill import DistillSettings
from moa.training.masks import additive, token_mask
from moa.training.teacher import Teacher
from moa.tree import TreeGrower, TreeShape
from tests.benchmarks.pairs import body, packed, prompts, target_for, tiny_target, whole

KNOWN = 11
"""Tokens that the target has run; the next is pending."""


def observed(target: Target, drafting: MoaDrafting, ids: list[int]) -> int:
    """A slot of a drafting that has seen the known tokens in two chunks."""
    slot, own = target.pool.acquire(), drafting.open()
    for part in (ids[:7], ids[7:KNOWN]):
        step = target.forward([Row.chain(slot, part)])
        drafting.observe(own, part, target.commit(step, 0, range(len(part))))
    return own


@torch.inference_mode()
def test_llama_and_drafting_agree_with_the_forward() -> None:
    target = target_for("independent", tiny_target())
    model = body("independent", target)
    ids = prompts(12)[0]
    tokens, positions = torch.tensor([ids]), torch.arange(12)[None]
    causal = additive(torch.ones(1, 1, 12, 12, dtype=torch.bool).tril())
    hidden, _ = model.features(tokens, positions, causal, model.empty_rows(tokens))
    wanted = model.logits(hidden)[0]
    llama: Any = as_llama(model, 512, (2,))
    torch.testing.assert_close(llama(tokens).logits[0], wanted, atol=1e-4, rtol=1e-4)

    drafting = MoaDrafting(model, slots=1, capacity=64)
    request = DraftRequest(observed(target, drafting, ids), ids[KNOWN], TreeShape.chain(1), SamplingSettings())
    level = Level([request], [TreeGrower(ids[KNOWN], request.shape)], drafting.pool, drafting.device)
    torch.testing.assert_close(drafting.logits(level)[0, 0], wanted[KNOWN], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_one_pass_says_what_training_computes_for_its_masks() -> None:
    target = target_for("pard", tiny_target())
    model = body("pard", target)
    assert isinstance(model, Pard)
    ids = prompts(20)[0]
    drafting = PardDrafting(model, slots=1, capacity=64)
    request = DraftRequest(observed(target, drafting, ids), ids[KNOWN], TreeShape.chain(4), SamplingSettings())
    grower, found = TreeGrower(ids[KNOWN], request.shape), []
    for _ in range(4):
        found.append(drafting.logits(Level([request], [grower], drafting.pool, drafting.device))[0, 0])
        grower.expand(np.array([[ids[0]]]), np.zeros((1, 1)))

    batch = whole(ids)
    masks = MaskBlocks(np.array([[3, KNOWN, KNOWN, 3, KNOWN]]), np.array([1, 1, 2, 2, 3]))
    inputs = torch.tensor([[*ids, *[MASK] * 5]])
    positions = torch.tensor([[*range(20), *(masks.anchors + masks.places)[0]]])
    seen = additive(masks.seen(token_mask(batch, None))).unsqueeze(1)
    hidden, _ = model.features(inputs, positions, seen, model.empty_rows(inputs))
    wanted = model.logits(hidden)[0, [KNOWN, 21, 22, 24]]
    torch.testing.assert_close(torch.stack(found), wanted, atol=1e-4, rtol=1e-4)


def test_the_loss_counts_only_tokens_of_the_block_s_document(tmp_path: Any) -> None:
    target = target_for("pard", tiny_target())
    model = body("pard", target)
    assert isinstance(model, Pard)
    task = PardTraining(model, Teacher(target.model), DistillSettings())
    rows = packed(tmp_path)
    batch = rows.rows(np.arange(2))
    whole_loss = task.loss(batch, 0, 0.0)
    assert whole_loss.weight == (batch.wanted[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1])).sum()
    assert MaskBlocks.draw(batch, 0, 0, block=BLOCK, share=KEPT, kept=KEPT).places.max() == BLOCK - 1
    # Of a document of three tokens, the last wanted, nothing two places ahead is left to learn.
    short = Batch(
        np.array([[5, 6, 7]]), np.ones((1, 3), np.int64), np.arange(3)[None], np.array([[False, False, True]]),
        np.zeros(1, np.int64),
    )  # fmt: skip
    plain = task.loss(short, 0, 0.0)
    assert plain.weight == 1
    assert float(plain.total.detach()) == pytest.approx(float(plain.total.detach()))
