"""The start of a `StateDrafter`: its maps as the least-squares solution from the target's states
and the next token to the next final state, and nothing from its layer. Before any training that
predicts a third of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moa.drafters.states.model import StateDrafter
from moa.training.data import Batch, PackedRows
from moa.training.losses import TeacherLike

_TOKENS_PER_INPUT = 25
"""Tokens for each number that the solution reads: with fewer it fits the sample."""
_RIDGE = 1e-3
"""Share of the inputs' mean square that is added to each: inputs that hardly vary get no large
weights."""
_STREAM = 8.0
"""The numbers between maps and head are so many times larger than the solution's: the optimizer's
steps have one size for all matrices, and would undo the start before the layer has learnt
anything."""
_LEAST_SCALE = 1e-6
"""The scale of an output that is always zero."""


@torch.no_grad()
def solve(model: StateDrafter, teacher: TeacherLike, data: PackedRows, at_once: int = 8) -> None:
    """Set the linear maps of `model` to the least-squares solution over rows of the data, drawn at
    random: from the target's states before a token, and the token, to the target's final state at
    it. `at_once` rows are run at a time; the teacher must keep the states that the model reads."""
    width = model.config.hidden_size
    sums = _Sums.empty(model.fuse.in_features + width, width, model.weight.device)
    order = np.random.default_rng(0).permutation(len(data))
    for first in range(0, len(data), at_once):
        batch = data.rows(order[first : first + at_once])
        sums.add(*_inputs_and_goals(model, teacher, batch))
        if sums.tokens >= _TOKENS_PER_INPUT * len(sums.x_by_x):
            break
    scale = (sums.y_squared / max(1, sums.tokens)).sqrt().clamp(min=_LEAST_SCALE)
    ridge = sums.ridge
    weights = torch.linalg.solve(sums.x_by_x + ridge, sums.x_by_y) / scale
    of_states = weights[:-width]
    of_token = weights[-width:]
    # What stands for the states of a drafted token: the solution's best guess of `fuse` from the
    # final state alone, which is the last of them.
    final_by_states = sums.x_by_x[-2 * width : -width, :-width]
    final_by_final = final_by_states[:, -width:]
    own = torch.linalg.solve(final_by_final + ridge[:width, :width], final_by_states @ of_states)
    model.fuse.weight.copy_(_STREAM * of_states.T)
    model.token.weight.copy_(_STREAM * of_token.T)
    model.own.weight.copy_(_STREAM * own.T)
    model.scale.copy_(scale / _STREAM)
    # The layer adds nothing yet.
    model.layer.self_attn.o_proj.weight.zero_()
    model.layer.mlp.down_proj.weight.zero_()


@dataclass
class _Sums:
    """Sums over tokens, of inputs x (the states before a token, side by side, then its embedding)
    and goals y (the state at it)."""

    x_by_x: Tensor
    """Of x x^T, `[inputs, inputs]`."""
    x_by_y: Tensor
    """Of x y^T, `[inputs, goals]`."""
    y_squared: Tensor
    """Of y squared, `[goals]`."""
    tokens: int = 0

    @classmethod
    def empty(cls, inputs: int, goals: int, device: torch.device) -> _Sums:
        """The sums over no token."""
        return cls(
            x_by_x=torch.zeros(inputs, inputs, device=device),
            x_by_y=torch.zeros(inputs, goals, device=device),
            y_squared=torch.zeros(goals, device=device),
        )

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add n tokens, `[n, inputs]` and `[n, goals]`."""
        self.x_by_x = self.x_by_x.addmm(x.T, x)
        self.x_by_y = self.x_by_y.addmm(x.T, y)
        self.y_squared = self.y_squared + y.square().sum(0)
        self.tokens += len(x)

    @property
    def ridge(self) -> Tensor:
        """What is added to `x_by_x` so that inputs which hardly vary get no large weights."""
        identity = torch.eye(len(self.x_by_x), device=self.x_by_x.device)
        return _RIDGE * self.x_by_x.diagonal().mean() * identity


def _inputs_and_goals(
    model: StateDrafter, teacher: TeacherLike, batch: Batch
) -> tuple[Tensor, Tensor]:
    """For each of the n tokens that have one before them in their document: what the drafter reads,
    the target's states before the token and its embedding side by side, `[n, inputs]`; and what it
    should predict, the target's final state at the token, `[n, width]`."""
    known = teacher(batch)
    device = model.weight.device
    segments = torch.from_numpy(batch.segments).to(device)
    # Tokens of a document have its number, from 1 on; 0 is padding.
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    states = model.normed(known.states.float())
    embedded = model.embed(torch.from_numpy(batch.ids).to(device)).float()
    x = torch.cat([states[:, :-1], embedded[:, 1:]], -1)[follows]
    y = known.hidden[:, 1:][follows].float()
    return x, y
