"""A drafter's KV cache: a slot of a fixed size for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moa.target.slots import Slots


class SlotPool(Slots):
    """Keys and values of every layer, `[layers, slots, kv_heads, capacity, head_dim]`, allocated
    once.

    A slot's first `lengths[slot]` columns are its committed prefix, which never changes; the
    columns after them are scratch of the last forward. So a rejected draft needs no clean-up: the
    length just does not advance.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the keys and values of `slots` sequences of up to `capacity` tokens, zeroed."""
        super().__init__(slots, capacity)
        shape = (layers, slots, kv_heads, capacity, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._written = [0] * slots
        """Columns of each slot that may hold anything but zeros."""

    def release(self, slot: int) -> None:
        """Release a slot, zeroed, so that its next user finds no data."""
        self.check_taken(slot)
        used = self._written[slot]
        self.k[:, slot, :, :used].zero_()
        self.v[:, slot, :, :used].zero_()
        self._written[slot] = 0
        self._give_back(slot)

    def begin(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Note that `sizes` scratch columns of `slots` are about to be written."""
        self.check_room(slots, sizes)
        for slot, size in zip(slots, sizes, strict=True):
            self._written[slot] = max(self._written[slot], self.lengths[slot] + size)

    def append(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Add rows `[layers, heads, n, D]` to a slot's prefix."""
        start = self.lengths[slot]
        count = k.shape[2]
        self.begin([slot], [count])
        self.k[:, slot, :, start : start + count] = k
        self.v[:, slot, :, start : start + count] = v
        self.lengths[slot] = start + count

    def prefix(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of a slot's prefix by layer, `[1, heads, n, D]` each: views."""
        stop = self.lengths[slot]
        keys = self.k[:, slot : slot + 1, :, :stop]
        values = self.v[:, slot : slot + 1, :, :stop]
        return list(zip(keys, values, strict=True))

    def append_layers(self, slot: int, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values `[1, heads, n, D]` of each layer to a slot's prefix."""
        keys = torch.cat([key for key, _ in rows])
        values = torch.cat([value for _, value in rows])
        self.append(slot, keys, values)
