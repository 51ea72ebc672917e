"""The drafter's KV cache and records: arrays that grow and are passed whole to ONNX Runtime.

Whole arrays are contiguous, so no call copies them; unused rows are masked. Rolling back only
lowers the length; nothing is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa.graph.step import Float, Heads, layer_rows
from moa.records import RecordLayout
from moa.tree import MASKED
from moa.wire import Ranges

_FIRST_ROWS = 256
"""Rows of an array at first."""
MORE_ROWS = 1 / 4
"""Share of its rows by which an array grows. Each call computes over all of them, also the unused
ones: with twice the rows a step over 4,100 tokens takes a third longer."""


class KVBuffer:
    """Keys and values of each layer, in arrays that grow."""

    def __init__(self, layers: Sequence[Heads]) -> None:
        self.size = _FIRST_ROWS
        self.arrays: list[Float] = layer_rows(layers, _FIRST_ROWS)
        """The keys and then the values of each layer, all of the same `size`; another list of
        others once they have grown."""

    def reserve(self, rows: int) -> None:
        """Make room for at least this many rows. Arrays that grow are new ones, with the old rows
        in front, and each old one is let go before the next grows: whoever is bound to them must
        have let go of them, too, or both are in memory at once."""
        if rows <= self.size:
            return
        wanted = max(rows, self.size + int(self.size * MORE_ROWS))
        size = -(-wanted // _FIRST_ROWS) * _FIRST_ROWS
        old_arrays = self.arrays
        self.arrays = []
        while old_arrays:
            old = old_arrays.pop(0)
            _, heads, _, width = old.shape
            grown = np.zeros((1, heads, size, width), np.float32)
            grown[:, :, : self.size] = old
            self.arrays.append(grown)
        self.size = size

    def put(self, start: int, rows: Sequence[NDArray[np.float32]]) -> None:
        """Put `[1, heads, n, width]` rows of every array at row `start` and after it."""
        stop = start + rows[0].shape[2]
        self.reserve(stop)
        for array, new in zip(self.arrays, rows, strict=True):
            array[:, :, start:stop] = new

    def gather(self, sources: Sequence[int], start: int) -> None:
        """Copy the rows with the numbers `sources`, in this order, to row `start` and after it: so
        the rows of accepted tokens are moved together."""
        stop = start + len(sources)
        if list(sources) == list(range(start, stop)):
            return  # they are there already
        for array in self.arrays:
            # Indexing with a list copies, so sources may lie where others are written.
            array[:, :, start:stop] = array[:, :, sources]


class RecordBuffer:
    """Activation records by position, with the ranges held. Missing ones are masked, so any subset
    works.

    Records may include rows of layers with a cache, which replace the drafter's own for the same
    tokens (`lend`): the target's in borrowed layers (TLI), and all of a drafter of states.
    """

    def __init__(self, heads: Heads, borrowed: Sequence[Heads] = ()) -> None:
        """Begin without records. `heads` are those of cross-attention (a count of 0 where there is
        none), `borrowed` those of each layer of the cache whose rows the records bring, too."""
        self.heads = heads
        self.borrowed = tuple(borrowed)
        parts = tuple((part.count, part.width) for part in (heads, *borrowed))
        self._layout = RecordLayout(parts)
        self.wire = Heads(self._layout.count, self._layout.width)
        """Heads of a record on the wire."""
        self.held = Ranges()
        """Positions of which there are records."""
        self._rows = KVBuffer([heads])
        """Cross-attention's keys and values, by position."""
        self._borrowed_rows = KVBuffer(self.borrowed)
        """The target's keys and values in the borrowed layers, by position."""
        self._not_replaced: list[tuple[int, int]] = []
        """Ranges in which the drafter's cache still has its own rows in the borrowed layers."""
        self._mask = self._masked(self._rows.size)
        """The additive mask of the records: 0 where one is held."""
        self._feeds = self._graph_inputs()

    def put(self, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store activation records of positions from `start` on: keys and values `[rows, heads,
        width]`, as they come from the wire. They are visible to the drafter from now on."""
        stop = start + len(keys)
        # Keys and values of each part of a record, as `[1, heads, rows, width]`: first those of
        # cross-attention, then those of each borrowed layer.
        own: list[NDArray[Any]] = []
        borrowed: list[NDArray[Any]] = []
        parts = zip(self._layout.split(keys), self._layout.split(values), strict=True)
        for number, part in enumerate(parts):
            arrays = own if number == 0 else borrowed
            arrays += [rows.transpose(1, 0, 2)[None] for rows in part]
        self._rows.put(start, own)
        if borrowed:
            self._borrowed_rows.put(start, borrowed)
        self._grow_mask()
        self._mask[..., start:stop] = 0
        self.held.add(start, stop)
        # Where the cache has these positions already, `lend` is to replace its rows.
        self.made(start, stop)

    def _grow_mask(self) -> None:
        """Make the mask as long as the arrays of records, if these have grown."""
        old_size = self._mask.shape[-1]
        if self._rows.size == old_size:
            return
        mask = self._masked(self._rows.size)
        mask[..., :old_size] = self._mask
        self._mask = mask
        self._feeds = self._graph_inputs()

    def made(self, start: int, stop: int) -> None:
        """Note that the drafter's cache has its own rows at these positions."""
        if self.borrowed:
            self._not_replaced.append((start, stop))

    def lend(self, rows: Sequence[NDArray[np.float32]], length: int) -> None:
        """Replace rows of a drafter's cache by those that records have brought, in its last layers
        (the borrowed ones), at positions that both have.

        `rows` are the cache's keys and values of each layer, `length` is how many tokens of the
        text it holds. Rows behind these are of a draft, and are looked at again later.
        """
        own_arrays = rows[-2 * len(self.borrowed) :]  # keys and values of each borrowed layer
        later: list[tuple[int, int]] = []
        for start, stop in self._not_replaced:
            for held_start, held_stop in self.held:
                first = max(held_start, start)
                last = min(held_stop, stop, length)
                if first >= last:
                    continue
                for own, targets in zip(own_arrays, self._borrowed_rows.arrays, strict=True):
                    own[:, :, first:last] = targets[:, :, first:last]
            if stop > length:
                later.append((max(start, length), stop))
        self._not_replaced = later

    def truncate(self, length: int) -> None:
        """Forget the records of positions from `length` on."""
        self._mask[..., length:] = MASKED
        self.held.truncate(length)

    def feeds(self) -> dict[str, NDArray[np.float32]]:
        """The graph's record inputs: the same arrays, changed in place until they must grow."""
        return self._feeds

    def _graph_inputs(self) -> dict[str, NDArray[np.float32]]:
        """The record inputs by name; a graph without cross-attention has none."""
        if not self.heads.count:
            return {}
        keys, values = self._rows.arrays
        return {"record_k": keys, "record_v": values, "record_mask": self._mask}

    def _masked(self, size: int) -> NDArray[np.float32]:
        """A mask that hides all of so many records."""
        return np.full((1, 1, 1, size), MASKED, np.float32)
