"""How much a drafted position counts in the loss: a draft is used only as far as all before it was accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from moa.training.data import Batch

LEAST = 1e-9
"""An acceptance is taken to be no less, so that its logarithm is finite."""


def lag_weights(newest: Tensor, decay: float) -> Tensor:
    """`[B, L]`: `decay ** (d - 1)` at a position `d` tokens after the newest activation that it sees."""
    index = torch.arange(newest.shape[1], device=newest.device)
    return decay ** (index - newest - 1).clamp(0, 64).float()


def prefix_weights(overlap: Tensor, counted: Tensor, newest: Tensor, batch: Batch) -> Tensor:
    """`[B, L]`: the chance that every token drafted since the newest activation was accepted before this position.

    A draft at a `counted` position is accepted with the probability `overlap` (one number for each such position, in
    order). Where no activation arrives after the prompt nobody verifies, and what is written is used to its end: there
    every position counts alike. A document's weights add up to the number of its counted positions, so that the loss
    keeps its scale and every document its share.
    """
    device = newest.device
    index = torch.arange(newest.shape[1], device=device).expand_as(newest)
    starts = index - torch.from_numpy(batch.positions).to(device)
    accepted = torch.ones(newest.shape, dtype=torch.float64, device=device)
    accepted[counted] = overlap.detach().double().clamp(min=LEAST)
    logs = accepted.log()
    before = logs.cumsum(1) - logs
    chance = (before - before.gather(1, torch.minimum(newest + 1, index))).exp()
    drafted = (newest >= starts) & torch.from_numpy(batch.wanted).to(device).gather(1, newest.clamp(min=0))
    chance = torch.where(_sums(drafted.double(), starts) > 0, chance, torch.ones_like(chance))
    chance = torch.where(counted, chance, torch.zeros_like(chance))
    scale = _sums(counted.double(), starts) / _sums(chance, starts).clamp(min=LEAST)
    return (chance * scale).float()


def _sums(values: Tensor, starts: Tensor) -> Tensor:
    """At every position the sum over its document, which is known by its first index in the row."""
    return torch.zeros_like(values).scatter_add(1, starts, values).gather(1, starts)
