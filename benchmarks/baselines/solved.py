"""Ours with the target's newest states at hand: what a linear map can say of the next state, and a layer that corrects
it.

Low, middle and high states and the final one, each normed, are fused beside the target. On the device a map of the
token is added to that, and one decoder layer to their sum. The maps start as the least-squares solution from states and
token to the next final state, the layer with nothing (docs/log/2026-11-23-a-real-model.md). What was only drafted is
fed back through a map of its own. A state may be missing: a learnt feature stands for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.baselines.config import BaselineConfig
from benchmarks.baselines.features import FeatureBaseline
from moa.model.blocks import RMSNorm
from moa.model.borrowed import Rows, SharedWeights
from moa.model.features import run_layer, self_rows
from moa.training.data import PackedRows
from moa.training.teacher import Teacher


class Solved(FeatureBaseline):
    """fuse(states of p - 1) + token(embedding of p) -> one layer -> state of p."""

    reads_first = True

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.tap_norms = nn.ModuleList(RMSNorm(width, eps) for _ in config.taps)
        self.fuse = nn.Linear(len(self.tap_norms) * width, width, bias=False)
        self.absent = nn.Parameter(torch.zeros(width))
        self.token_norm, self.own_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.token = nn.Linear(width, width, bias=False)
        self.own = nn.Linear(width, width, bias=False)
        self.layer = self.block()
        self.scale = nn.Parameter(torch.ones(width))

    def read(self, features: Tensor) -> Tensor:
        """The fused states."""
        fused: Tensor = self.fuse(self.normed(features))
        return fused

    def normed(self, features: Tensor) -> Tensor:
        """The states side by side, each normed."""
        parts = features.chunk(len(self.tap_norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)

    def again(self, hidden: Tensor) -> Tensor:
        """What stands for the fused states of a token that was only drafted."""
        found: Tensor = self.own(self.own_norm(hidden))
        return found

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(self.layer, self.layer.input_layernorm(self._join(ids, features)), *self.rotary(positions))

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The predicted state at each token, and the cache rows."""
        x = self._join(ids, features)
        x, rows = run_layer(self.layer, x, self.layer.input_layernorm(x), *self.rotary(positions), mask, past)
        return x * self.scale, rows

    def _join(self, ids: Tensor, features: Tensor) -> Tensor:
        joined: Tensor = features + self.token(self.token_norm(self.embed(ids)))
        return joined


STREAM = 8.0
"""The numbers between start and head are so many times larger than the solution's: the optimizer's steps have one size
for all matrices, and would undo the start before the layer has learnt anything."""


@torch.no_grad()
def solve(model: Solved, teacher: Teacher, data: PackedRows, rows: int = 160, at_once: int = 8) -> None:
    """The start: least squares from fused states and token to the next final state, and nothing from the layer."""
    width = model.config.hidden_size
    size = model.fuse.in_features + width
    gram, goal = torch.zeros(size, size), torch.zeros(size, width)
    power, sums, count = torch.zeros(width), torch.zeros(size), 0
    for at in range(0, min(rows, len(data)), at_once):
        batch = data.rows(np.arange(at, min(at + at_once, len(data))))
        lesson = teacher(batch)
        segments = torch.from_numpy(batch.segments)
        inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        states = model.normed(lesson.states.float())
        tokens = model.token_norm(model.embed(torch.from_numpy(batch.ids)).float())
        x = torch.cat([states[:, :-1], tokens[:, 1:]], -1)[inside]
        y = lesson.hidden[:, 1:][inside].float()
        gram, goal = gram.addmm(x.T, x), goal.addmm(x.T, y)
        sums, power, count = sums + x.sum(0), power + y.square().sum(0), count + len(x)
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(size)
    scale = (power / count).sqrt()
    weights = torch.linalg.solve(gram + ridge, goal) / scale
    of_states = weights[:-width]
    between = gram[:-width, :-width]
    own = torch.linalg.solve(between[-width:, -width:] + ridge[:width, :width], between[-width:] @ of_states)
    for parameter, value in (
        (model.fuse.weight, of_states.T), (model.token.weight, weights[-width:].T), (model.own.weight, own.T),
        (model.absent, (sums[:-width] / count) @ of_states),
    ):  # fmt: skip
        parameter.copy_(STREAM * value)
    model.scale.copy_(scale / STREAM)
    for branch in (model.layer.self_attn.o_proj, model.layer.mlp.down_proj):
        branch.weight.zero_()
