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

_POLYNOMIAL = (3.4445, -4.775, 2.0315)
"""Coefficients of Newton and Schulz's iteration, a x + b x^3 + c x^5, as Muon's author chose them:
singular values reach about 1 in few steps."""
_ITERATIONS = 5
_MOMENTUM = 0.95
_LEAST_NORM = 1e-7
"""The norm of an update of zeros, by which it is divided."""
_AS_ADAM = 0.2
"""Root mean square of an element of AdamW's steps, to which Muon's are scaled."""


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
        """Move every matrix that has a gradient: by its momentum, made orthogonal, so that no
        direction is larger than another."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                # Nesterov's momentum: the gradient counts once more.
                update = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM), self._dtype)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                # An orthogonal matrix has elements of 1 / sqrt(its longer side): this makes them as
                # large as those of AdamW's steps.
                size = _AS_ADAM * math.sqrt(max(matrix.shape))
                matrix.add_(update, alpha=-size * group["lr"])


def orthogonal(update: Tensor, dtype: torch.dtype) -> Tensor:
    """About the orthogonal matrix that is nearest to `update`: an iteration moves all of its
    singular values to about 1. `dtype` is what the products are computed in."""
    a, b, c = _POLYNOMIAL
    is_wide = update.shape[0] <= update.shape[1]
    x = (update if is_wide else update.T).to(dtype)  # so that the products are small
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        inner = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, inner, x, beta=a)
    return x if is_wide else x.T
