"""EAGLE-3.1's drafter: low, middle and high target states, each normed and fused; trained on its own outputs.

EAGLE-3 (Li et al., NeurIPS 2025): `fuse` joins the inputs of three target layers, the one decoder layer reads the
normed embedding and the normed feature side by side on the feature's residual, and what it feeds on after the first
drafted token is its own output. Training does the same for several steps ("training-time test", `chains.py`), step s
weighing 0.8 ** s, with no loss on features. 3.1 norms each target state before it is fused, feeds back its output
behind the last norm, and takes seven steps. Here the head is the target's, frozen, where the public code trains one
over a reduced vocabulary: at equal trainable size its own head would leave no parameters for the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.baselines.config import BaselineConfig
from benchmarks.baselines.features import FeatureBaseline
from moa.model.blocks import RMSNorm
from moa.model.borrowed import Rows
from moa.model.features import run_layer, self_rows
from moa.model.shared import SharedWeights
from moa.model.target import Committed, Step, Target
from moa.training.teacher import Lesson


class TappedTarget(Target):
    """A target whose commits carry the states of the tapped layers in place of the final one."""

    @torch.inference_mode()
    def commit(self, step: Step, b: int, path: Sequence[int]) -> Committed:
        """As the target's own."""
        return replace(super().commit(step, b, path), hidden=step.tapped(b, path))


class Eagle3(FeatureBaseline):
    """norm(embedding of token p) and norm(feature of p - 1) -> one layer of double input width -> feature of p."""

    reads_first = False
    final = False
    """Whether the final state is read beside the tapped ones."""

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        states = len(config.taps) + self.final
        self.tap_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(states))
        self.fuse = nn.Linear(states * config.hidden_size, config.hidden_size, bias=False)
        self.layer = self.block()
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, width, bias=False))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def states(self, lesson: Lesson) -> Tensor:
        """What it reads of a lesson."""
        assert lesson.tapped is not None
        return torch.cat([lesson.tapped, lesson.hidden], -1) if self.final else lesson.tapped

    def read(self, features: Tensor) -> Tensor:
        """Norm and fuse the tapped states."""
        parts = features.chunk(len(self.tap_norms), dim=-1)
        normed = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
        fused: Tensor = self.fuse(torch.cat(normed, dim=-1))
        return fused

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(self.layer, self._join(ids, features), *self.rotary(positions))

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The feature at each token, input of the next one, and the cache rows."""
        x, rows = run_layer(self.layer, features, self._join(ids, features), *self.rotary(positions), mask, past)
        return self.norm(x), rows

    def _join(self, ids: Tensor, features: Tensor) -> Tensor:
        embedded = self.layer.input_layernorm(self.embed(ids))
        return torch.cat([embedded, self.hidden_norm(features).to(embedded.dtype)], dim=-1)


class Anyhow(Eagle3):
    """The same with the final state too, and a feature that stands for a state that is not there."""

    final = True

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.absent = nn.Parameter(torch.zeros(config.hidden_size))
