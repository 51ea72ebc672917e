"""The drafter's KV cache and records: arrays that grow by doubling and are passed whole to ONNX
Runtime.

Whole arrays are contiguous, so no call copies them; unused rows are masked. Rolling back only
lowers the length; nothing is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa.graph.step import Heads, LayerRows
from moa.records import RecordLayout
from moa.tree import MASKED
from moa.wire import Ranges

_FIRST = 256


class KVBuffer:
    """`LayerRows` that grow: `arrays` are all of the same `size`, and another list of them once
    they have grown."""

    def __init__(self, layers: Sequence[Heads]) -> None:
        self.size = _FIRST
        self._layers = layers
        self._rows = LayerRows(layers, _FIRST)

    @property
    def arrays(self) -> list[NDArray[np.float32]]:
        """Keys and values of each layer."""
        return self._rows.arrays

    def reserve(self, rows: int) -> None:
        """Grow to at least this many rows."""
        if rows <= self.size:
            return
        before = self._rows
        size = self.size
        while self.size < rows:
            self.size *= 2
        self._rows = LayerRows(self._layers, self.size)
        for new, old in zip(self._rows.stacks, before.stacks, strict=True):
            new[:, :, :size] = old

    def write(self, at: int, rows: LayerRows) -> None:
        """Put the rows of the same layers at row `at`."""
        stop = at + rows.stacks[0].shape[2]
        self.reserve(stop)
        for mine, new in zip(self._rows.stacks, rows.stacks, strict=True):
            mine[:, :, at:stop] = new

    def put(self, at: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Put `[1, heads, n, width]` rows of every array at row `at`."""
        stop = at + rows[0].shape[2]
        self.reserve(stop)
        for mine, new in zip(self.arrays, rows, strict=True):
            mine[:, :, at:stop] = new

    def gather(self, sources: Sequence[int], to: int) -> None:
        """Copy rows to `to`, `to + 1`, ... ."""
        if list(sources) == list(range(to, to + len(sources))):
            return
        for stack in self._rows.stacks:
            stack[:, :, to : to + len(sources)] = stack[
                :, :, sources
            ]  # fancy indexing copies before writing


class RecordBuffer:
    """Activation records by position, with the ranges held. Missing ones are masked, so any subset
    works.

    Records may include rows of layers with a cache, which replace the drafter's own for the same
    tokens (`lend`): the target's in borrowed layers (TLI), and all of a drafter of states.
    """

    def __init__(self, heads: Heads, borrowed: Sequence[Heads] = ()) -> None:
        """`heads` are cross-attention's, none where there is none; `borrowed` those of each such
        layer."""
        self.heads = heads
        self.borrowed = tuple(borrowed)
        self._layout = RecordLayout(tuple((of.count, of.width) for of in (heads, *borrowed)))
        self.wire = Heads(self._layout.count, self._layout.width)
        """Heads of a record on the wire."""
        self.held = Ranges()
        self._rows = KVBuffer([heads])
        self._theirs = KVBuffer(self.borrowed)
        self._due: list[tuple[int, int]] = []
        """Ranges in which the drafter's cache still has its own rows in the borrowed layers."""
        self._mask = np.full((1, 1, 1, self._rows.size), MASKED, np.float32)
        self._feeds = self._named()

    def put(self, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store records `[rows, heads, width]`, as on the wire, of positions from `start` on."""
        stop = start + len(keys)
        before = self._rows.size
        parts = zip(self._layout.split(keys), self._layout.split(values), strict=True)
        own, *theirs = ([rows.transpose(1, 0, 2)[None] for rows in pair] for pair in parts)
        self._rows.put(start, own)
        if theirs:
            self._theirs.put(start, [rows for pair in theirs for rows in pair])
        if self._rows.size > before:
            mask = np.full((1, 1, 1, self._rows.size), MASKED, np.float32)
            mask[..., :before] = self._mask
            self._mask = mask
            self._feeds = self._named()
        self._mask[..., start:stop] = 0
        self.held.add(start, stop)
        self.made(start, stop)

    def made(self, start: int, stop: int) -> None:
        """Note that the drafter has computed its own rows at these positions."""
        if self.borrowed:
            self._due.append((start, stop))

    def lend(self, rows: Sequence[NDArray[np.float32]], length: int) -> None:
        """Replace the drafter's rows by the target's, in the last layers of a cache with `length`
        committed rows."""
        waiting: list[tuple[int, int]] = []
        for start, stop in self._due:
            for first, last in self.held:
                first = max(first, start)
                last = min(last, stop, length)
                if first < last:
                    for mine, theirs in zip(
                        rows[-2 * len(self.borrowed) :], self._theirs.arrays, strict=True
                    ):
                        mine[:, :, first:last] = theirs[:, :, first:last]
            if stop > length:
                waiting.append((max(start, length), stop))
        self._due = waiting

    def truncate(self, length: int) -> None:
        """Forget the records of positions from `length` on."""
        self._mask[..., length:] = MASKED
        self.held.truncate(length)

    def feeds(self) -> dict[str, NDArray[np.float32]]:
        """The graph's record inputs: the same arrays, changed in place until they must grow."""
        return self._feeds

    def _named(self) -> dict[str, NDArray[np.float32]]:
        keys, values = self._rows.arrays
        return (
            {"record_k": keys, "record_v": values, "record_mask": self._mask}
            if self.heads.count
            else {}
        )
