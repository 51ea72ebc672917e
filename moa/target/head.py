"""The LM head of a target in float32, whatever its weights are in."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import linear

from moa.errors import UsageError
from moa.target.products import Product, widened

_ROWS_AT_ONCE = 1024
"""Rows of the weight that are widened at once: 1,024 of 2,048 numbers are 8 MiB in float32."""


class Head:
    """The product of final states and the LM head's weight."""

    def __init__(self, weight: Tensor, *, pack: bool) -> None:
        """`pack`: beside the weight a float32 copy in oneDNN's layout is kept: to widen it in every
        forward takes as long as eight layers."""
        self.weight = weight
        self.packs = pack

    @cached_property
    def wide(self) -> Product | None:
        """The product with a float32 copy of the weight, which is made when it is first asked for;
        None for a head that keeps no copy."""
        if not self.packs:
            return None
        try:
            return widened(self.weight)
        except (MemoryError, RuntimeError) as error:
            size = 4 * self.weight.numel() / 2**30
            raise UsageError(
                f"no memory for the {size:.1f} GiB of the LM head in float32",
                hint="lower --kv-tokens",
            ) from error

    def forget_weight(self) -> Tensor:
        """Keep only the size of the weight, whose copy computes from now on, and return what is
        left of it: a tensor without numbers."""
        assert self.wide is not None, "nothing else has its numbers"
        self.weight = torch.empty_like(self.weight, device="meta")
        return self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits, float32 `[n, vocab]`, of final states `[n, hidden]`. Sums are made in
        float32 also where the weights are of lower precision: two best tokens are then seldom
        equal."""
        if self.wide is not None:
            return self.wide(hidden)
        if self.weight.dtype == torch.float32:
            return linear(hidden, self.weight)
        if self.weight.device.type == "cuda":  # only there a product may have another precision
            return torch.mm(hidden, self.weight.T, out_dtype=torch.float32)
        return self._widened_in_pieces(hidden)

    def _widened_in_pieces(self, hidden: Tensor) -> Tensor:
        """The logits in float32, with a few rows of the weight widened at a time: there is never a
        float32 copy of all of it."""
        logits = hidden.new_empty(len(hidden), len(self.weight), dtype=torch.float32)
        wide = hidden.float()
        for start in range(0, len(self.weight), _ROWS_AT_ONCE):
            stop = start + _ROWS_AT_ONCE
            logits[:, start:stop] = wide @ self.weight[start:stop].float().T
        return logits
