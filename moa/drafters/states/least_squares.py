"""The start of a `StateDrafter`: its maps as the least-squares solution from the target's states
and the next token to the next final state, and nothing from its layer. Before any training that
predicts a third of the tokens."""

from __future__ import annotations

import numpy as np
import torch

from moa.drafters.states.model import StateDrafter
from moa.training.data import PackedRows
from moa.training.losses import TeacherLike

_TOKENS_PER_INPUT = 25
"""Tokens for each number that the solution reads: with fewer it fits the sample."""
_RIDGE = 1e-3
"""Of the inputs' mean square, added to each: inputs that hardly vary get no large weights."""
_STREAM = 8.0
"""The numbers between maps and head are so many times larger than the solution's: the optimizer's
steps have one size for all matrices, and would undo the start before the layer has learnt
anything."""


@torch.no_grad()
def solve(model: StateDrafter, teacher: TeacherLike, data: PackedRows, at_once: int = 8) -> None:
    """Start `model` from rows of the data, drawn at random. The teacher must tap what the model
    reads."""
    device = model.weight.device
    width = model.config.hidden_size
    size = model.fuse.in_features + width
    gram = torch.zeros(size, size, device=device)
    goal = torch.zeros(size, width, device=device)
    power = torch.zeros(width, device=device)
    count = 0
    drawn = np.random.default_rng(0).permutation(len(data))
    for at in range(0, len(data), at_once):
        batch = data.rows(drawn[at : at + at_once])
        known = teacher(batch)
        segments = torch.from_numpy(batch.segments).to(device)
        inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        states = model.normed(known.states.float())
        tokens = model.embed(torch.from_numpy(batch.ids).to(device)).float()
        x = torch.cat([states[:, :-1], tokens[:, 1:]], -1)[inside]
        y = known.hidden[:, 1:][inside].float()
        gram = gram.addmm(x.T, x)
        goal = goal.addmm(x.T, y)
        power = power + y.square().sum(0)
        count = count + len(x)
        if count >= _TOKENS_PER_INPUT * size:
            break
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(size, device=device)
    scale = (power / max(1, count)).sqrt().clamp(min=1e-6)
    weights = torch.linalg.solve(gram + ridge, goal) / scale
    of_states = weights[:-width]
    of_token = weights[-width:]
    # What stands for the states of a drafted token: the solution's best guess of `fuse` from the
    # final state alone.
    between = gram[:-width, :-width]
    own = torch.linalg.solve(
        between[-width:, -width:] + ridge[:width, :width], between[-width:] @ of_states
    )
    for linear, value in ((model.fuse, of_states), (model.token, of_token), (model.own, own)):
        linear.weight.copy_(_STREAM * value.T)
    model.scale.copy_(scale / _STREAM)
    for branch in (model.layer.self_attn.o_proj, model.layer.mlp.down_proj):
        branch.weight.zero_()
