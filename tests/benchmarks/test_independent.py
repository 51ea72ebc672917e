"""The independent drafter: one definition for training and drafting, and the same model as a plain Llama."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.baselines.independent import Independent, IndependentDrafting, as_llama
from moa.model.drafting import DraftRequest, Level
from moa.model.target import Row
from moa.sampling import SamplingSettings
from moa.training.masks import additive
from moa.tree import TreeGrower, TreeShape
from tests.benchmarks.pairs import baseline, prompts, target_for, tiny_target


@torch.inference_mode()
def test_llama_and_drafting_agree_with_the_forward() -> None:
    target = target_for("independent", tiny_target())
    model: Any = baseline("independent", target, layers=2)
    assert isinstance(model, Independent)
    ids = prompts(12)[0]
    tokens, positions = torch.tensor([ids]), torch.arange(12)[None]
    causal = additive(torch.ones(1, 1, 12, 12, dtype=torch.bool).tril())
    hidden, _ = model(tokens, positions, causal, [model.empty_rows(tokens)] * 2)
    wanted = model.logits(hidden)[0]
    llama: Any = as_llama(model, 512, (2,))
    torch.testing.assert_close(llama(tokens).logits[0], wanted, atol=1e-4, rtol=1e-4)

    drafting = IndependentDrafting(model, slots=1, capacity=64)
    slot, own = target.pool.acquire(), drafting.open()
    for part in (ids[:7], ids[7:11]):
        step = target.forward([Row.chain(slot, part)])
        drafting.observe(own, part, target.commit(step, 0, range(len(part))))
    request = DraftRequest(own, ids[11], TreeShape.chain(1), SamplingSettings())
    grower = TreeGrower(ids[11], request.shape)
    logits = drafting.logits(Level([request], [grower], drafting.pool, drafting.device))
    torch.testing.assert_close(logits[0, 0], wanted[11], atol=1e-4, rtol=1e-4)
