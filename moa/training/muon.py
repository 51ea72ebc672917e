"""Muon, with its products in the precision that the device computes in.

`torch.optim.Muon` makes the steps orthogonal in bfloat16 everywhere. A CPU that only emulates
bfloat16 spends nine tenths of a training there. Everything else is as in the library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_SLOPE = (3.4445, -4.775, 2.0315)
_STEPS = 5
_MOMENTUM = 0.95
_LEAST = 1e-7


class Muon(torch.optim.Optimizer):
    """Orthogonal steps for matrices, as large as AdamW's, by Newton and Schulz's iteration, with
    Nesterov momentum."""

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                update = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM), self._dtype)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])


def orthogonal(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly orthogonal, in the direction of `update`."""
    first, second, third = _SLOPE
    wide = update.shape[0] <= update.shape[1]
    x = (update if wide else update.T).to(dtype)
    x = x / x.norm().clamp(min=_LEAST)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return x if wide else x.T
