"""The rows of one forward: trees of tokens behind a slot's committed ones, validated and packed. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from moa.errors import UsageError

Judged = Literal["all", "last", "none", "read"]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sequence's part of a forward: a tree of tokens after the slot's committed prefix.

    `parents[i]` is a node of this row before node i, or -1 where the node continues the prefix
    itself.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int]
    judged: Judged = "all"
    """Nodes for which `Step.argmax` computes the next token; a prompt's earlier tokens need no LM
    head. With `read` none is judged, but logits of some will be read: a target that can compute
    them in the forward alone computes all."""

    @classmethod
    def chain(cls, slot: int, tokens: Sequence[int], judged: Judged = "last") -> Self:
        """A plain run of tokens: a chunk of a prompt."""
        return cls(slot, tokens, range(-1, len(tokens) - 1), judged)


@dataclass(frozen=True)
class RowBatch:
    """The rows of a forward, validated, and packed: the nodes of row b are those from `starts[b]` to
    `starts[b + 1]` in every array here."""

    rows: list[Row]
    slots: list[int]
    sizes: list[int]
    starts: IntArray
    ids: IntArray
    parents: IntArray
    """Of each node, counted within its row."""

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> Self:
        """Pack the rows of a forward, a tree of tokens for each slot, one after another into
        arrays. A `UsageError` for whatever would crash the model: no rows, a slot twice, tokens
        outside of the vocabulary, parents that do not come before their nodes."""
        if not rows:
            raise UsageError("a forward needs at least one row")
        slots = [row.slot for row in rows]
        if len(set(slots)) < len(slots):
            raise UsageError("two rows of one forward use the same slot")
        sizes = [len(row.tokens) for row in rows]
        for row, size in zip(rows, sizes, strict=True):
            if not size or len(row.parents) != size:
                raise UsageError(
                    f"slot {row.slot}: a row needs tokens and a parent for each, not {size} and {len(row.parents)}"
                )
        ids = np.concatenate([_integers(row.tokens, row.slot) for row in rows])
        parents = np.concatenate([_integers(row.parents, row.slot) for row in rows])
        batch = cls(
            rows=list(rows),
            slots=slots,
            sizes=sizes,
            starts=np.concatenate([[0], np.cumsum(sizes)]),
            ids=ids,
            parents=parents,
        )
        is_no_token = (ids < 0) | (ids >= vocab_size)
        if is_no_token.any():
            slot = batch.slot_of_first(is_no_token)
            raise UsageError(f"slot {slot}: token ids must be 0..{vocab_size - 1}")
        is_misplaced = (parents < -1) | (parents >= batch.nodes)
        if is_misplaced.any():
            slot = batch.slot_of_first(is_misplaced)
            raise UsageError(f"slot {slot}: a node's parent must come before it, or be -1")
        return batch

    @cached_property
    def nodes(self) -> IntArray:
        """Each node's number within its row."""
        return np.arange(len(self.ids)) - np.repeat(self.starts[:-1], self.sizes)

    def slot_of_first(self, nodes: npt.NDArray[np.bool_]) -> int:
        """The slot of the first node of the batch that is flagged."""
        first = nodes.argmax()
        row = int(np.searchsorted(self.starts, first, side="right")) - 1
        return self.slots[row]

    def chain(self, b: int) -> bool:
        """Whether row b is a chain: no branches, each token the next one's parent."""
        span = slice(self.starts[b], self.starts[b + 1])
        return bool((self.parents[span] == self.nodes[span] - 1).all())

    def check_path(self, b: int, path: Sequence[int]) -> None:
        """A `UsageError` unless `path` leads down row b's tree: its first node continues the slot's
        prefix, and each other has the one before it as its parent."""
        parents = self.parents[self.starts[b] : self.starts[b + 1]]
        previous = -1
        for node in path:
            if not 0 <= node < self.sizes[b] or parents[node] != previous:
                raise UsageError(f"slot {self.slots[b]}: node {node} does not continue the path")
            previous = node

    def judged(self) -> npt.NDArray[np.bool_]:
        """A flag for each node (token) of the batch: whether the target's choice after it is
        computed in the forward. After most tokens of a prompt none is wanted, which saves the LM
        head."""
        # In every mode a row's judged nodes are its last ones.
        first_judged = []
        for row, size in zip(self.rows, self.sizes, strict=True):
            if row.judged == "all":
                first_judged.append(0)
            elif row.judged == "last":
                first_judged.append(size - 1)
            else:  # "none", or "read": the logits are read later
                first_judged.append(size)
        return self.nodes >= np.repeat(first_judged, self.sizes)


def _integers(values: Sequence[int], slot: int) -> IntArray:
    """Tokens or parents of a slot's row as an array; a `UsageError` where some are no integers."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"slot {slot}: tokens and parents must be plain integers") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"slot {slot}: tokens and parents must be plain integers")
    return array.astype(np.int64, copy=False)
