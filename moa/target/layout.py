"""How the rows of one forward read the KV cache: which are attended together, where they are, and
their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moa.target.pages import PAGE, PagePool, pages_for
from moa.target.rows import IntArray, RowBatch
from moa.tree import Mask, ancestors

_ALONE_BYTES = 2**15
"""A row that can be read in place is attended alone if its keys have at least this many bytes:
below that a copy is faster than one more call."""
_PADDING = 1.5
"""How much larger a group's padded product may be than the sum of its rows' products."""
_FREE_PADDING = 64 * PAGE
"""Padding that any group may have: less than one more call would cost."""


@dataclass(frozen=True)
class Group:
    """Rows whose attention is one product, padded to `width` tokens that look at `view` columns."""

    rows: int
    width: int
    view: int
    first: int
    """First column of a row that is read in place; -1 if its pages are gathered."""
    pages: Tensor | None
    """The pages `[rows * view / PAGE]` of rows that are read by a copy."""
    padded_tokens: Tensor | None
    """For each place of the padded rows, `[rows * width]`, the token of the batch that stands there;
    None for a single row, which needs no padding: `tokens` in order."""
    real_places: Tensor | None
    """The places of the padded rows that are not padding; None: all."""
    tokens: Tensor | slice
    """Indices of the group's tokens in the batch."""
    members: Sequence[int]
    """The batch's rows that are in it."""
    masks: Mapping[str, Tensor | None]
    """For each kind of layer an additive mask `[rows, 1, repeats * width, view]`; None hides
    nothing."""

    def read(self, memory: Tensor) -> Tensor:
        """The keys or values `[rows, kv_heads, view, head_dim]` that the group's rows attend over,
        out of a layer's memory `[columns, kv_heads, head_dim]`. A row whose pages lie side by side
        is read in place, without a copy; else the pages are copied together."""
        if self.pages is None:
            return memory[self.first : self.first + self.view].unsqueeze(0).transpose(1, 2)
        page_numbers = PAGE * memory.shape[1] * memory.shape[2]
        copied = memory.view(-1, page_numbers).index_select(0, self.pages)
        return copied.view(self.rows, self.view, *memory.shape[1:]).transpose(1, 2)


class Layout:
    """Where each token of a batch is written, its position, and its mask."""

    def __init__(
        self,
        batch: RowBatch,
        pool: PagePool,
        *,
        windows: Mapping[str, int | None],
        repeats: int,
        together: bool = False,
        same_size: bool = False,
    ) -> None:
        """Lay out the rows of a batch, for which `pool.begin` has reserved columns.

        `windows` are the sliding windows of each kind of layer; `repeats` query heads share a key
        head. `together` makes one group of all rows, which the library's models need; with
        `same_size` the rows of a group have as many tokens, for models that padding would change.
        """
        self._batch = batch
        self._pool = pool
        self._repeats = repeats
        self._windows = windows
        self._lengths = np.array([pool.lengths[slot] for slot in batch.slots], dtype=np.int64)
        """Committed tokens of each row's slot."""
        self._trees = _trees(batch)
        self._depths = np.concatenate([tree.sum(-1) for tree in self._trees]) - 1
        """Each token's distance from the first of its path in the draft."""
        lengths = np.repeat(self._lengths, batch.sizes)
        slots = np.repeat(batch.slots, batch.sizes)
        # Siblings share a position, and each has a column of its own.
        self.positions = self._on_device(lengths + self._depths)
        self.columns = self._on_device(pool.columns(slots, lengths + batch.nodes))
        """The column of each token's keys and values."""
        if together:
            groups = [list(range(len(batch.slots)))]
        elif same_size:
            groups = self._rows_of_same_size()
        else:
            groups = self._rows_of_like_size()
        self.groups = [self._group(members) for members in groups]

    def _rows_of_like_size(self) -> list[list[int]]:
        """Group the rows of the batch, each group for one product of attention. A long row whose
        pages lie side by side is a group alone, because it can be read without a copy; the others
        are together with rows of like size, so that little is padded."""
        pool = self._pool
        batch = self._batch
        key_bytes = pool.k.element_size() * pool.k.shape[2] * pool.k.shape[3]
        groups: list[list[int]] = []
        others: list[_RowSize] = []
        for row, (slot, size) in enumerate(zip(batch.slots, batch.sizes, strict=True)):
            view = int(self._lengths[row]) + size
            if pool.contiguous[slot] and view * key_bytes >= _ALONE_BYTES:
                groups.append([row])
            else:
                others.append(_RowSize(size, view, row))
        # The most tokens first, so that a group's first row is the widest.
        others.sort(reverse=True)
        while others:
            count = _fitting(others)
            groups.append([sized.row for sized in others[:count]])
            others = others[count:]
        return groups

    def _rows_of_same_size(self) -> list[list[int]]:
        """Group the rows by their number of tokens."""
        by_size: dict[int, list[int]] = {}
        for row, size in enumerate(self._batch.sizes):
            by_size.setdefault(size, []).append(row)
        return list(by_size.values())

    def _group(self, rows: Sequence[int]) -> Group:
        """Make the group of these rows of the batch, whose attention is one product: how wide its
        rows are padded, where each of its tokens comes from, where its keys are read, and its
        masks."""
        batch = self._batch
        pool = self._pool
        slots = [batch.slots[row] for row in rows]
        width = max(batch.sizes[row] for row in rows)
        view = max(int(self._lengths[row]) + batch.sizes[row] for row in rows)
        in_place = len(rows) == 1 and pool.contiguous[slots[0]]
        if not in_place:
            view = pages_for(view) * PAGE  # a copy takes whole pages
        places = self._token_places(rows, width)
        return Group(
            rows=len(rows),
            width=width,
            view=view,
            first=PAGE * int(pool.tables[slots[0], 0]) if in_place else -1,
            pages=None if in_place else self._on_device(self._pages(slots, view // PAGE)),
            padded_tokens=places.padded_tokens,
            real_places=places.real_places,
            tokens=places.tokens,
            members=rows,
            masks=self._masks(rows, width, view),
        )

    def _token_places(self, rows: Sequence[int], width: int) -> _TokenPlaces:
        """Which tokens the rows of a group have, and where they stand once these are padded to
        `width` tokens."""
        batch = self._batch
        if len(rows) == 1:
            return _TokenPlaces(self._tokens_of(rows[0]))
        tokens_of_rows = [np.arange(batch.starts[row], batch.starts[row + 1]) for row in rows]
        tokens = self._on_device(np.concatenate(tokens_of_rows))
        sizes = np.array([batch.sizes[row] for row in rows])
        if sizes.min() == width:
            return _TokenPlaces(tokens, padded_tokens=tokens)
        # Padding repeats a row's own tokens; what is computed for it is thrown away.
        padded = [np.resize(of_row, width) for of_row in tokens_of_rows]
        is_real = np.arange(width) < sizes[:, None]
        return _TokenPlaces(
            tokens,
            padded_tokens=self._on_device(np.concatenate(padded)),
            real_places=self._on_device(np.flatnonzero(is_real)),
        )

    def _tokens_of(self, row: int) -> slice:
        """Where the tokens of a row are in the batch."""
        return slice(int(self._batch.starts[row]), int(self._batch.starts[row + 1]))

    def _pages(self, slots: Sequence[int], count: int) -> IntArray:
        """The numbers of the first `count` pages of each slot's text, `[slots * count]`."""
        # A shorter row repeats its own last page: masked values must be finite, and those of
        # another slot may be NaN.
        last = np.array([self._pool.pages_held[slot] - 1 for slot in slots])
        places = np.minimum(np.arange(count), last[:, None])
        return np.take_along_axis(self._pool.tables[slots], places, 1).ravel()

    def _masks(self, rows: Sequence[int], width: int, view: int) -> dict[str, Tensor | None]:
        """The masks of a group of rows, by kind of layer; kinds with the same sliding window share
        one. The rows are padded to `width` tokens, which look at `view` columns of the cache."""
        made: dict[int | None, Tensor | None] = {}
        masks: dict[str, Tensor | None] = {}
        for kind, window in self._windows.items():
            if window is not None and window >= view:
                window = None  # it hides nothing
            if window not in made:
                made[window] = self._mask(rows, width, view, window)
            masks[kind] = made[window]
        return masks

    def _mask(
        self, rows: Sequence[int], width: int, view: int, window: int | None
    ) -> Tensor | None:
        """The additive attention mask `[rows, 1, repeats * width, view]` of a group of rows, 0
        where a token sees a column and the dtype's smallest number where it does not; None where
        nothing is hidden.

        A token sees its slot's committed tokens, itself and its ancestors in the draft; with a
        sliding `window` only the last so many of these. Rows are padded to `width` tokens, and look
        at `view` columns of the cache.
        """
        sees_all = all(self._lengths[row] + 1 == view for row in rows)
        if width == 1 and window is None and sees_all:
            return None
        dtype = self._pool.k.dtype
        hidden = np.float32(torch.finfo(dtype).min)
        mask = np.full((len(rows), 1, width, view), hidden, dtype=np.float32)
        for row_mask, row in zip(mask[:, 0], rows, strict=True):
            self._show(row_mask, row)
            if window is not None:
                self._hide_far(row_mask, row, window, hidden)
        if self._repeats > 1:
            mask = np.tile(mask, (1, 1, self._repeats, 1))
        return torch.from_numpy(mask).to(self._pool.k.device, dtype)

    def _show(self, mask: npt.NDArray[np.float32], row: int) -> None:
        """Set to 0, in a mask `[tokens, columns]` that hides all, what the tokens of a row see: the
        slot's committed tokens, and each its ancestors in the draft and itself."""
        length = int(self._lengths[row])
        size = self._batch.sizes[row]
        mask[:, :length] = 0.0
        among_tokens = mask[:size, length : length + size]
        among_tokens[self._trees[row]] = 0.0

    def _hide_far(
        self, mask: npt.NDArray[np.float32], row: int, window: int, hidden: np.float32
    ) -> None:
        """Set to `hidden`, in the mask `[tokens, columns]` of a row, what its sliding window hides.
        Distances are counted along the tree's path, where siblings share a position, and not by
        columns."""
        length = int(self._lengths[row])
        size = self._batch.sizes[row]
        positions = length + self._depths[self._tokens_of(row)]
        seen_positions = np.concatenate([np.arange(length), positions])
        is_far = positions[:, None] - seen_positions >= window
        mask[:size, : length + size][is_far] = hidden

    def _on_device(self, array: npt.NDArray) -> Tensor:
        """The array as a tensor on the pool's device."""
        return torch.from_numpy(array).to(self._pool.k.device)


class _TokenPlaces(NamedTuple):
    """The tokens of a group, as `Group` has them."""

    tokens: Tensor | slice
    padded_tokens: Tensor | None = None
    real_places: Tensor | None = None


class _RowSize(NamedTuple):
    """A row's tokens and columns, in the order in which rows are grouped."""

    size: int
    """Tokens."""
    view: int
    """Columns that its tokens look at."""
    row: int


def _fitting(rows: Sequence[_RowSize]) -> int:
    """How many of these rows, from the first on, are to be one product: as many as do not need too
    much padding. All are padded to the tokens of the first row, which has the most, and to the most
    columns that any of them looks at."""
    width = rows[0].size
    view = rows[0].view
    own_area = rows[0].size * rows[0].view
    for count, row in enumerate(rows[1:], 1):
        view = max(view, row.view)
        own_area += row.size * row.view
        padded_area = width * view * (count + 1)
        if padded_area > _PADDING * own_area + _FREE_PADDING:
            return count
    return len(rows)


def _trees(batch: RowBatch) -> list[Mask]:
    """For each row of the batch a mask `[tokens, tokens]` of who sees whom in its draft tree: it is
    true where the second token is the first one's ancestor, or itself."""
    trees = [_triangle(size) for size in batch.sizes]  # right for rows without a branch
    branched = [row for row in range(len(batch.slots)) if not batch.chain(row)]
    if not branched:
        return trees
    sizes = [batch.sizes[row] for row in branched]
    parents: IntArray = np.full((len(branched), max(sizes)), -1, dtype=np.int64)
    for index, row in enumerate(branched):
        parents[index, : sizes[index]] = batch.parents[batch.starts[row] : batch.starts[row + 1]]
    # All trees at once, padded to the largest.
    for row, size, tree in zip(branched, sizes, ancestors(parents), strict=True):
        trees[row] = tree[:size, :size]
    return trees


@lru_cache(maxsize=256)
def _triangle(size: int) -> Mask:
    """The tree of a chain: each token sees those before it, and itself."""
    return np.tri(size, dtype=np.bool_)
