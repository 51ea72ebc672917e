"""The inputs of a forward on an accelerator: tiers of rows and tokens, and one static buffer that
one upload fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from moa.errors import UsageError
from moa.target.pages import PAGE, PagePool
from moa.target.rows import IntArray, RowBatch

SPLIT = 512
"""Columns of the context that one part of attention sums over; a part begins at a multiple of it."""
NODES = 64
"""Nodes of a tree: a bit of a token's ancestor mask each. Longer rows must be chains."""
FEWEST, MOST = 8, 512
"""Tokens of the smallest and the largest tier. A larger batch is several forwards."""
_CHAIN = np.array([(2 << node) - 1 for node in range(NODES)], dtype=np.uint64).view(np.int64)


class Tier(NamedTuple):
    """The size of a forward; a smaller one is padded. With `head`, the LM head runs for the tokens
    that need it."""

    rows: int
    tokens: int
    head: bool

    @classmethod
    def of(cls, rows: int, tokens: int, head: bool) -> Tier:
        """The smallest that holds so many rows and tokens."""
        return cls(power_of_two(rows), max(FEWEST, power_of_two(tokens), power_of_two(rows)), head)

    @property
    def name(self) -> str:
        """For people and metrics."""
        return f"{self.rows}x{self.tokens}{'' if self.head else ' prompt'}"


class RowPiece(NamedTuple):
    """Consecutive tokens of a row of the batch: a whole row, or a part of a long chain."""

    row: int
    start: int
    stop: int


A = TypeVar("A")


class ForwardInput(NamedTuple, Generic[A]):
    """Views of a static buffer for one tier, in this order, all int32 but the masks."""

    masks: A
    """int64: bit j is set where the token sees node j of its row. Not read in rows of more than
    `NODES`."""
    ids: A
    positions: A
    columns: A
    """Where each token's keys and values are written; the spare page's first column for padding."""
    token_row: A
    """-1: padding."""
    judged: A
    """Tokens that the LM head runs for; padded with token 0."""
    starts: A
    """`[rows + 1]`: the first token of each row."""
    lengths: A
    block_row: A
    """The row of each block of queries; -1: none."""
    block_first: A
    table: A
    """`[rows, pages of a slot]`."""


class Buffers:
    """A pinned array on the host, and its copy on the device."""

    def __init__(self, pool: PagePool, group: int) -> None:
        self._pool = pool
        self._block = query_block(group)
        largest = Tier(power_of_two(min(pool.slots, MOST)), MOST, True)
        size = self._size(largest)
        device = pool.k.device
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._array = self._host.numpy()

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self._device.nbytes

    def views(self, tier: Tier) -> ForwardInput[Tensor]:
        """The device's copy, as this tier's inputs."""
        masks, *rest, table = self._device[: self._size(tier)].split(self._lengths(tier))
        return ForwardInput._make([masks.view(torch.int64), *rest, table.view(tier.rows, -1)])

    def clear(self, tier: Tier) -> None:
        """Padding alone: a forward that touches no slot."""
        self._blank(tier)
        self._upload(tier)

    def fill(
        self, tier: Tier, batch: RowBatch, pieces: Sequence[RowPiece], judged: IntArray
    ) -> None:
        """Write these pieces of the batch, and upload them. `judged` are indices into the tokens of
        the pieces."""
        to = self._blank(tier)
        at = block = 0
        for place, (row, start, stop) in enumerate(pieces):
            slot = batch.slots[row]
            size = stop - start
            first = int(batch.starts[row])
            length = self._pool.lengths[slot] + start
            nodes = slice(at, at + size)
            parents = batch.parents[first + start : first + stop] - start
            depths = np.arange(size)
            if size <= NODES:
                depths, to.masks[nodes] = _ancestors(parents)
            to.ids[nodes] = batch.ids[first + start : first + stop]
            to.positions[nodes] = length + depths
            to.columns[nodes] = self._pool.columns(slot, np.arange(length, length + size))
            to.token_row[nodes] = place
            to.lengths[place], to.starts[place + 1 :] = length, at + size
            blocks = -(-size // self._block)
            to.block_row[block : block + blocks] = place
            to.block_first[block : block + blocks] = np.arange(0, size, self._block)
            held = self._pool.pages_held[slot]
            to.table[place, :held] = self._pool.tables[slot, :held]
            at = at + size
            block = block + blocks
        to.judged[: len(judged)] = judged
        self._upload(tier)

    def _blank(self, tier: Tier) -> ForwardInput[IntArray]:
        array = self._array[: self._size(tier)]
        array[:] = 0
        masks, *rest, table = np.split(array, np.cumsum(self._lengths(tier))[:-1])
        made: ForwardInput[IntArray] = ForwardInput._make(
            [masks.view(np.int64), *rest, table.reshape(tier.rows, -1)]
        )
        made.columns[:] = self._pool.pages * PAGE
        made.token_row[:], made.block_row[:] = -1, -1
        return made

    def _upload(self, tier: Tier) -> None:
        size = self._size(tier)
        self._device[:size].copy_(self._host[:size], non_blocking=True)

    def _lengths(self, tier: Tier) -> list[int]:
        rows, tokens, _ = tier
        blocks = rows + tokens // self._block
        return [
            2 * tokens,
            *[tokens] * 5,
            rows + 1,
            rows,
            blocks,
            blocks,
            rows * self._pool.pages_per_slot,
        ]

    def _size(self, tier: Tier) -> int:
        return sum(self._lengths(tier))


def query_block(group: int) -> int:
    """Tokens of a row that attention reads keys for together: with their heads, a tile of at most
    64 rows."""
    return max(1, min(16, 64 // power_of_two(group)))


def check_nodes(batch: RowBatch) -> None:
    """Raise where a tree has more nodes than a mask has bits."""
    for row, size in enumerate(batch.sizes):
        if size > NODES and not batch.chain(row):
            raise UsageError(
                f"slot {batch.slots[row]}: a tree has {NODES} nodes at most on an accelerator, not {size}"
            )


def cut(batch: RowBatch, most: int = MOST) -> list[list[RowPiece]]:
    """Forwards of at most `most` tokens, in this order: the pieces of a long chain look at those
    before them."""
    forwards: list[list[RowPiece]] = [[]]
    used = 0
    for row, size in enumerate(batch.sizes):
        start = 0
        while start < size:
            stop = min(size, start + most)
            if used + stop - start > most:
                forwards.append([])
                used = 0
            forwards[-1].append(RowPiece(row, start, stop))
            used = used + stop - start
            start = stop
    return forwards


def _ancestors(parents: IntArray) -> tuple[IntArray, IntArray]:
    """The depth of each node, and itself and its ancestors as bits; a parent below 0 is the prefix."""
    if (parents == np.arange(-1, len(parents) - 1)).all():
        return np.arange(len(parents)), _CHAIN[: len(parents)]
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return np.array(depths), np.array(masks, dtype=np.uint64).view(np.int64)


def power_of_two(number: int) -> int:
    """The smallest that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
