"""How the rows of one forward read the KV cache: which are attended together, where they are, and
their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moa.target.pages import PAGE, PagePool
from moa.target.rows import IntArray, RowBatch
from moa.tree import Mask, ancestors

_WORTH_ALONE = 2**15
"""A row that can be read in place is attended alone if its keys have at least this many bytes:
below that a copy is faster than one more call."""
_PADDING = 1.5
"""How much larger a group's padded product may be than the sum of its rows' products."""


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
    picks: Tensor | None
    """The batch's token `[rows * width]` for each place of the padded rows; None: all `tokens` in
    order."""
    real: Tensor | None
    """The places that are not padding; None: all."""
    tokens: Tensor | slice
    """Indices of the group's tokens in the batch."""
    members: Sequence[int]
    """The batch's rows that are in it."""
    masks: Mapping[str, Tensor | None]
    """For each kind of layer an additive mask `[rows, 1, repeats * width, view]`; None hides
    nothing."""

    def read(self, memory: Tensor) -> Tensor:
        """Keys or values `[rows, kv_heads, view, head_dim]` out of a layer's memory `[columns,
        kv_heads, head_dim]`."""
        if self.pages is None:
            return memory[self.first : self.first + self.view].unsqueeze(0).transpose(1, 2)
        found = memory.view(-1, PAGE * memory.shape[1] * memory.shape[2]).index_select(
            0, self.pages
        )
        return found.view(self.rows, self.view, *memory.shape[1:]).transpose(1, 2)


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
        """For rows for which `pool.begin` has reserved columns. `repeats` query heads share a key
        head; `together` makes one group of all rows, which the library's models need; with
        `same_size` those of a group have as many tokens, for models that padding would change."""
        self._batch = batch
        self._pool = pool
        self._repeats = repeats
        self._lengths = np.array([pool.lengths[slot] for slot in batch.slots], dtype=np.int64)
        self._trees = _trees(batch)
        depths = np.concatenate([tree.sum(-1) for tree in self._trees]) - 1
        places = np.repeat(self._lengths, batch.sizes)
        self.positions = self._on_device(places + depths)
        self.columns = self._on_device(
            pool.columns(np.repeat(batch.slots, batch.sizes), places + batch.nodes)
        )
        """The column of each token's keys and values."""
        self._depths = depths
        self._windows = windows
        rows = list(range(len(batch.slots)))
        divide = self._same_size if same_size else self._alike
        groups = [rows] if together else divide(rows)
        self.groups = [self._group(members) for members in groups]

    def _alike(self, rows: list[int]) -> list[list[int]]:
        """Group the rows: long ones that need no copy alone, the others with rows of similar size."""
        pool = self._pool
        sizes = self._batch.sizes
        key_bytes = pool.k.element_size() * pool.k.shape[2] * pool.k.shape[3]
        found: list[list[int]] = []
        rest: list[tuple[int, int, int]] = []
        for b in rows:
            view = int(self._lengths[b]) + sizes[b]
            if pool.straight[self._batch.slots[b]] and view * key_bytes >= _WORTH_ALONE:
                found.append([b])
            else:
                rest.append((sizes[b], view, b))
        area = padded_view = 0
        group: list[int] = []
        for size, view, b in sorted(rest, reverse=True):
            width = sizes[group[0]] if group else size
            padded_view = max(padded_view, view) if group else view
            area = area + size * view if group else size * view
            if group and width * padded_view * (len(group) + 1) > _PADDING * area + 64 * PAGE:
                found.append(group)
                group = []
                area = size * view
                padded_view = view
            group.append(b)
        return [*found, group] if group else found

    def _same_size(self, rows: list[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for b in rows:
            found.setdefault(self._batch.sizes[b], []).append(b)
        return list(found.values())

    def _group(self, rows: Sequence[int]) -> Group:
        batch = self._batch
        pool = self._pool
        sizes = [batch.sizes[b] for b in rows]
        width = max(sizes)
        needed = int(max(self._lengths[b] + batch.sizes[b] for b in rows))
        slots = [batch.slots[b] for b in rows]
        in_place = len(rows) == 1 and pool.straight[slots[0]]
        view = needed if in_place else -(-needed // PAGE) * PAGE
        spans = [np.arange(batch.starts[b], batch.starts[b + 1]) for b in rows]
        tokens: Tensor | slice
        picks = real = None
        if len(rows) == 1:
            tokens = slice(int(batch.starts[rows[0]]), int(batch.starts[rows[0] + 1]))
        else:
            tokens = self._on_device(np.concatenate(spans))
            picks = tokens
            if min(sizes) < width:
                picks = self._on_device(np.concatenate([np.resize(span, width) for span in spans]))
                real = self._on_device(np.flatnonzero(np.arange(width) < np.array(sizes)[:, None]))
        return Group(
            rows=len(rows),
            width=width,
            view=view,
            first=PAGE * int(pool.tables[slots[0], 0]) if in_place else -1,
            pages=None if in_place else self._on_device(self._pages(slots, view // PAGE)),
            picks=picks,
            real=real,
            tokens=tokens,
            members=rows,
            masks=self._masks(rows, width, view),
        )

    def _pages(self, slots: Sequence[int], count: int) -> IntArray:
        # A shorter row repeats its own last page: masked values must be finite, and those of
        # another slot may be NaN.
        last = np.array([self._pool.pages_held[slot] - 1 for slot in slots])
        at = np.minimum(np.arange(count), last[:, None])
        return np.take_along_axis(self._pool.tables[slots], at, 1).ravel()

    def _masks(self, rows: Sequence[int], width: int, view: int) -> dict[str, Tensor | None]:
        # A window at least as wide as the rows hides nothing.
        real = {
            kind: w if w is not None and w < view else None for kind, w in self._windows.items()
        }
        made = {window: self._mask(rows, width, view, window) for window in set(real.values())}
        return {kind: made[window] for kind, window in real.items()}

    def _mask(
        self, rows: Sequence[int], width: int, view: int, window: int | None
    ) -> Tensor | None:
        if width == 1 and window is None and all(self._lengths[b] + 1 == view for b in rows):
            return None
        dtype = self._pool.k.dtype
        mask = np.full(
            (len(rows), 1, width, view), np.float32(torch.finfo(dtype).min), dtype=np.float32
        )
        for place, b in enumerate(rows):
            tree = self._trees[b]
            length = int(self._lengths[b])
            size = self._batch.sizes[b]
            mask[place, 0, :, :length] = 0.0
            mask[place, 0, :size, length : length + size][tree] = 0.0
            if window is not None:
                # Counted along the tree's path, where siblings share a position, and not by
                # columns.
                span = slice(self._batch.starts[b], self._batch.starts[b + 1])
                node = length + self._depths[span]
                seen = np.concatenate([np.arange(length), node])
                far = node[:, None] - seen >= window
                mask[place, 0, :size, : length + size][far] = np.float32(torch.finfo(dtype).min)
        repeated = np.tile(mask, (1, 1, self._repeats, 1)) if self._repeats > 1 else mask
        return torch.from_numpy(repeated).to(self._pool.k.device, dtype)

    def _on_device(self, array: npt.NDArray) -> Tensor:
        return torch.from_numpy(array).to(self._pool.k.device)


def _trees(batch: RowBatch) -> list[Mask]:
    """Ancestor-or-self `[t, t]` of each row."""
    trees = [_triangle(size) for size in batch.sizes]
    branched = [b for b in range(len(batch.slots)) if not batch.chain(b)]
    if branched:
        sizes = [batch.sizes[b] for b in branched]
        parents: IntArray = np.full((len(branched), max(sizes)), -1, dtype=np.int64)
        for row, b in enumerate(branched):
            parents[row, : sizes[row]] = batch.parents[batch.starts[b] : batch.starts[b + 1]]
        for b, size, tree in zip(branched, sizes, ancestors(parents), strict=True):
            trees[b] = tree[:size, :size]
    return trees


@lru_cache(maxsize=256)
def _triangle(size: int) -> Mask:
    return np.tri(size, dtype=np.bool_)
