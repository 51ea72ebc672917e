"""Memory of the drafter: rows of keys and values in arrays that grow by doubling, handed to ONNX Runtime whole.

Whole arrays are contiguous, so no call copies them; rows that do not count are masked. Rolling back is a smaller
length, and nothing is ever cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.drafter.graph import Heads
from moa.wire import Ranges

MASKED = np.float32(-1e9)
"""Additive mask value; finite, as the graph expects it."""
_FIRST = 256


class Rows:
    """`arrays` of `[1, heads, size, width]`, all of the same `size`; another list of them once they have grown."""

    def __init__(self, heads: Heads, arrays: int, *, first: int = _FIRST) -> None:
        self.size = first
        self.arrays = [np.zeros((1, heads.count, first, heads.width), np.float32) for _ in range(arrays)]

    def reserve(self, rows: int) -> None:
        """Make room for this many rows."""
        if rows <= self.size:
            return
        size = self.size
        while size < rows:
            size *= 2
        grown = [np.zeros((1, old.shape[1], size, old.shape[3]), np.float32) for old in self.arrays]
        for new, old in zip(grown, self.arrays, strict=True):
            new[:, :, : self.size] = old
        self.arrays, self.size = grown, size

    def write(self, at: int, rows: Sequence[NDArray[Any]]) -> None:
        """Put `[1, heads, n, width]` rows of every array at row `at`."""
        count = rows[0].shape[2]
        self.reserve(at + count)
        for array, new in zip(self.arrays, rows, strict=True):
            array[:, :, at : at + count] = new

    def gather(self, sources: Sequence[int], to: int) -> None:
        """Copy rows to `to`, `to + 1`, ... ."""
        if list(sources) == list(range(to, to + len(sources))):
            return
        for array in self.arrays:
            array[:, :, to : to + len(sources)] = array[:, :, sources]  # fancy indexing reads all before writing


class RecordBuffer:
    """Activation records by position, with the ranges held. Holes are masked, so any subset will do."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.held = Ranges()
        self._rows = Rows(heads, 2)
        self._feeds = self._named(np.full((1, 1, 1, self._rows.size), MASKED, np.float32))

    def put(self, start: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Take records `[rows, heads, width]` of positions from `start` on."""
        stop, before = start + len(keys), self._rows.size
        self._rows.write(start, [rows.transpose(1, 0, 2)[None] for rows in (keys, values)])
        if self._rows.size > before:
            mask = np.full((1, 1, 1, self._rows.size), MASKED, np.float32)
            mask[..., :before] = self._feeds["record_mask"]
            self._feeds = self._named(mask)
        self._feeds["record_mask"][..., start:stop] = 0
        self.held.add(start, stop)

    def truncate(self, length: int) -> None:
        """Forget the records of positions from `length` on."""
        self._feeds["record_mask"][..., length:] = MASKED
        self.held.truncate(length)

    def feeds(self) -> dict[str, NDArray[np.float32]]:
        """The graph's record inputs: the same arrays, filled in place, until they have to grow."""
        return self._feeds

    def _named(self, mask: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        keys, values = self._rows.arrays
        return {"record_k": keys, "record_v": values, "record_mask": mask}
