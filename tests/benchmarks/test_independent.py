"""The drafter without records is a plain Llama."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.baselines.independent import as_llama
from moa.model.blocks import additive
from moa.model.drafting import DraftRequest, Level, MoaDrafting
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings
from moa.tree import TreeGrower, TreeShape
from tests.benchmarks.pairs import body, prompts, target_for, tiny_target

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
    model = body(target)
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
