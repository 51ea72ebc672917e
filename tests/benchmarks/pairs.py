"""Tiny targets with tiny baselines beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.baselines.presets import NO_RECORDS, moa_config
from benchmarks.baselines.registry import Feature, FeatureDrafter, new_baseline, shape_for
from moa.drafters.attention.model import AttentionDrafter, new_attention
from moa.model.borrowed import SharedWeights
from moa.target.torch_target import Target
from moa.training.data import Batch, Document, PackedRows, pack
from testing.tiny import tiny

Model = TypeVar("Model", bound=nn.Module)
KINDS: tuple[Feature, ...] = ("eagle2", "eagle3", "states")
OPPONENTS = (*KINDS, "independent")
WIDE = {"self_attention_intermediate_size": 320, "cross_attention_intermediate_size": 320}
"""At the tiny width the MoA drafter is smaller than the smallest EAGLE-3; wider, there is something
to match."""


def target_for(kind: str, model: PreTrainedModel, *, slots: int = 3, capacity: int = 128) -> Target:
    """A target that keeps the states that this kind of drafter reads."""
    target = Target.from_model(model, slots=slots, capacity=capacity)
    if kind in KINDS and (taps := baseline(kind, target).config.taps):  # type: ignore[arg-type]
        target.tap(taps)
    return target


def baseline(kind: Feature, target: Target) -> FeatureDrafter:
    """A baseline unlike the target's own shape wherever it may be, whose random weights are wide
    enough for its guesses to depend on everything it reads."""
    config = shape_for(kind, target.facts, intermediate_size=40, heads=4, kv_heads=2)
    return _widened(new_baseline(config, SharedWeights.of(target.model)))


def body(target: Target) -> AttentionDrafter:
    """A drafter without records, likewise."""
    config = moa_config(
        target.facts, {**NO_RECORDS, "layers": 2, "self_attention_intermediate_size": 40}
    )
    return _widened(new_attention(config, target.model))


def opponent(kind: str, target: Target) -> AttentionDrafter | FeatureDrafter:
    """Any of the drafters that ours is compared with."""
    return body(target) if kind == "independent" else baseline(kind, target)  # type: ignore[arg-type]


def _widened(model: Model) -> Model:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(
                    torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
                )
    return model.eval()


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of the tiny vocabulary, without its special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(length)] for length in lengths]


def packed(folder: Path, documents: int = 60) -> PackedRows:
    """A little random training data."""
    texts = prompts(*([24] * documents), seed=2)
    return pack((Document.answer(text[:5], text[5:]) for text in texts), 64, folder)


def whole(ids: list[int]) -> Batch:
    """One document as a batch."""
    tokens = np.array([ids])
    ones = np.ones_like(tokens)
    return Batch(tokens, ones, np.arange(len(ids))[None], ones.astype(bool), np.zeros(1, np.int64))


def tiny_target() -> PreTrainedModel:
    """A fresh tiny Llama."""
    return tiny("llama")
