"""The rows of one batched forward: what callers ask for, checked and padded into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from moa.errors import UsageError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sequence's share of a forward: a tree of tokens behind the slot's committed prefix.

    `parents[i]` is a node of this row before node i, or -1 where the node continues the prefix itself.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int]
    judged: Literal["all", "last", "none"] = "all"
    """Nodes whose next token `Step.argmax` finds; a prompt's earlier tokens need no pass through the LM head."""

    @classmethod
    def chain(cls, slot: int, tokens: Sequence[int], judged: Literal["all", "last", "none"] = "last") -> Self:
        """A plain run of tokens: a chunk of a prompt."""
        return cls(slot, tokens, range(-1, len(tokens) - 1), judged)


@dataclass(frozen=True)
class RowBatch:
    """Rows padded to one width. Padding nodes are children of node 0 and nobody's parent, so nothing sees them."""

    rows: list[Row]
    slots: list[int]
    sizes: list[int]
    ids: IntArray
    parents: IntArray

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> Self:
        """Check everything that a model would not survive, and pad."""
        if not rows:
            raise UsageError("a forward needs at least one row")
        slots = [row.slot for row in rows]
        if len(set(slots)) < len(slots):
            raise UsageError("two rows of one forward use the same slot")
        sizes = [len(row.tokens) for row in rows]
        ids = np.zeros((len(rows), max(sizes)), dtype=np.int64)
        parents = np.zeros_like(ids)
        for b, row in enumerate(rows):
            if not sizes[b] or len(row.parents) != sizes[b]:
                raise UsageError(
                    f"slot {row.slot}: a row needs tokens and a parent for each, not {sizes[b]} and {len(row.parents)}"
                )
            ids[b, : sizes[b]] = _integers(row.tokens, row.slot)
            parents[b, : sizes[b]] = _integers(row.parents, row.slot)
        if ids.min() < 0 or ids.max() >= vocab_size:
            b = int(((ids < 0) | (ids >= vocab_size)).any(axis=1).argmax())
            raise UsageError(f"slot {slots[b]}: token ids must be 0..{vocab_size - 1}")
        misplaced = (parents < -1) | (parents >= np.arange(ids.shape[1]))
        misplaced[:, 0] = parents[:, 0] != -1
        if misplaced.any():
            b = int(misplaced.any(axis=1).argmax())
            raise UsageError(f"slot {slots[b]}: a node's parent must come before it, or be -1")
        return cls(list(rows), slots, sizes, ids, parents)

    def judged(self) -> npt.NDArray[np.bool_]:
        """Which nodes [B,T] the LM head must look at."""
        node = np.arange(self.ids.shape[1])
        sizes = np.asarray(self.sizes)[:, None]
        first = [
            {"all": 0, "last": size - 1, "none": size}[row.judged]
            for row, size in zip(self.rows, self.sizes, strict=True)
        ]
        return (node >= np.asarray(first)[:, None]) & (node < sizes)


def _integers(values: Sequence[int], slot: int) -> IntArray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"slot {slot}: tokens and parents must be plain integers") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"slot {slot}: tokens and parents must be plain integers")
    return array.astype(np.int64, copy=False)
