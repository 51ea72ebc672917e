"""Drafting in one pass says what training computes for its masks, and never changes the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa.block import Said, Walk
from moa.config import DrafterConfig
from moa.errors import ConfigError
from moa.model.checkpoint import load_drafter, new_drafter, save_drafter
from moa.model.drafter import Drafter
from moa.model.drafting import DraftRequest, Level
from moa.model.generate import GenerationSettings, Speculator
from moa.model.one_pass import OnePassDrafting
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings
from moa.training.block import MaskBlocks
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.masks import AnchorRule
from moa.training.teacher import Teacher
from moa.tree import TreeGrower, TreeShape
from tests.tiny import tiny

KNOWN = 11
BLOCK = 5


def pair(slots: int = 1, **shape: Any) -> tuple[Target, Drafter]:
    target = Target.from_model(tiny("llama"), slots=slots, capacity=128)
    torch.manual_seed(1)
    config = DrafterConfig.for_target(target.facts, block=BLOCK, pair_rank=8, **shape)
    drafter = new_drafter(config, target.model)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4.0)
    return target, drafter.eval()


def random_ids(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(4, 128, count).tolist()
    return ids


@pytest.mark.parametrize("shape", [{}, {"tli": 1}, {"layers": 2, "use_ca": False}])
@torch.inference_mode()
def test_a_pass_says_what_training_computes_for_its_masks(shape: dict[str, Any]) -> None:
    target, drafter = pair(**shape)
    drafting, ids = OnePassDrafting(drafter, capacity=64), random_ids(0, 20)
    slot, own = target.pool.acquire(), drafting.open()
    for part in (ids[:7], ids[7:KNOWN]):
        step = target.forward([Row.chain(slot, part)])
        drafting.observe(own, part, target.commit(step, 0, range(len(part))))
    request = DraftRequest(own, ids[KNOWN], TreeShape.chain(BLOCK), SamplingSettings())
    level = Level([request], [TreeGrower(ids[KNOWN], request.shape)], drafting.pool, drafting.device)
    (said,) = drafting._say(level, BLOCK)

    # Outside every spacing, a document has the activations of its prompt: those of the tokens that the target has run.
    task = Distillation(drafter, Teacher(target.model), DistillSettings(anchors=AnchorRule(())))
    at = np.arange(20)[None]
    batch = Batch(np.array([ids]), np.ones((1, 20), np.int64), at, at >= KNOWN, np.zeros(1, np.int64))
    masks = MaskBlocks(np.full((1, BLOCK - 1), KNOWN), np.arange(1, BLOCK))
    latest = task.settings.anchors.latest(batch, 0, 0)
    hidden, _ = task._draft(batch, task.teacher(batch), latest, 0, 0.0, masks)
    wanted = drafter.logits(hidden[:, [KNOWN, *range(20, 20 + BLOCK - 1)]]).log_softmax(-1)[0]
    top = wanted.topk(said.tokens.shape[1])
    np.testing.assert_allclose(said.logp, top.values.numpy(), atol=1e-4)
    assert (said.tokens[:, :4] == top.indices[:, :4].numpy()).all()


@torch.inference_mode()
def test_the_walk_computes_the_pair_head() -> None:
    _, drafter = pair()
    head, vocabulary = drafter.block_head, 128
    hidden, previous = torch.randn(2, 64), torch.tensor([7, 90])
    logits = drafter.logits(hidden).log_softmax(-1)
    every = torch.arange(vocabulary).expand(2, -1).numpy()
    said = Said(every, logits.numpy(), head.gates(hidden).numpy())
    pairs = head.pairs(drafter.shared, vocabulary)
    tokens, found = Walk(said, pairs).after(1, previous.tolist())
    informed = head.informed(hidden[1:], drafter.embed(previous))
    wanted = drafter.logits(informed).log_softmax(-1).sort(descending=True, stable=True)
    np.testing.assert_allclose(found, wanted.values.numpy(), atol=1e-4)
    assert (tokens[:, :20] == wanted.indices[:, :20].numpy()).all()


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=5)], ids=["T0", "T1"])
@pytest.mark.parametrize("shape", [{}, {"tli": 1, "final_state": True}])
def test_text_does_not_depend_on_the_drafter(shape: dict[str, Any], sampling: SamplingSettings) -> None:
    target, drafter = pair(slots=3, **shape)
    drafting = OnePassDrafting(drafter, slots=3, capacity=128)
    asked = [random_ids(seed, count) for seed, count in enumerate((1, 2, 17, 30))]
    plain = Speculator(target).generate(asked, GenerationSettings(max_new_tokens=24, shape=None, sampling=sampling))
    for tree in (TreeShape.chain(9), TreeShape(breadth=4, depth=3, nodes=12)):
        settings = GenerationSettings(max_new_tokens=24, shape=tree, sampling=sampling, adapt=False)
        found = Speculator(target, drafting).generate(asked, settings)
        assert [g.ids for g in found] == [g.ids for g in plain]
        assert all(g.drafted for g in found)


def test_a_folder_is_the_drafter_and_without_a_block_nothing_is_added(tmp_path: Path) -> None:
    target, drafter = pair()
    save_drafter(drafter, tmp_path)
    again = load_drafter(tmp_path, target.model, target.facts)
    assert again.config == drafter.config
    torch.testing.assert_close(dict(again.state_dict()), dict(drafter.state_dict()))
    plain = new_drafter(DrafterConfig.for_target(target.facts), target.model)
    assert not [name for name in plain.state_dict() if "block" in name]


def test_blocks_that_cannot_be() -> None:
    target, _ = pair()
    for block in (1, -1, 1000):
        with pytest.raises(ConfigError, match="block must be 0 or 2"):
            DrafterConfig.for_target(target.facts, block=block)
