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
"""The ancestor masks of a chain's tokens: token j sees tokens 0 to j, bits 0 to j."""


class Tier(NamedTuple):
    """The size of a forward; a smaller one is padded. With `head`, the LM head runs for the tokens
    that need it."""

    rows: int
    tokens: int
    head: bool

    @classmethod
    def of(cls, rows: int, tokens: int, head: bool) -> Tier:
        """The smallest tier, the size of a captured graph, that holds so many rows and tokens.
        Sizes are powers of two, so that few graphs serve all forwards."""
        padded_rows = power_of_two(rows)
        padded_tokens = max(FEWEST, power_of_two(tokens), padded_rows)
        return cls(padded_rows, padded_tokens, head)

    @property
    def name(self) -> str:
        """The tier's name for people and metrics: `4x16`, and `4x16 prompt` without the LM head."""
        size = f"{self.rows}x{self.tokens}"
        return size if self.head else f"{size} prompt"


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
        """Allocate the inputs of the largest forward; smaller ones use the beginning. `group` is
        the number of query heads that share a key head."""
        self._pool = pool
        self._block = query_block(group)
        largest = Tier(power_of_two(min(pool.slots, MOST)), MOST, True)
        size = self._size(largest)
        device = pool.k.device
        # Pinned memory is copied to a card without waiting.
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._array = self._host.numpy()

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return self._device.nbytes

    def views(self, tier: Tier) -> ForwardInput[Tensor]:
        """The inputs of a tier, as views of the device's copy."""
        masks, *rest, table = self._device[: self._size(tier)].split(self._lengths(tier))
        return ForwardInput._make([masks.view(torch.int64), *rest, table.view(tier.rows, -1)])

    def clear(self, tier: Tier) -> None:
        """Fill a tier's inputs with padding alone, and upload them: a forward over them touches no
        slot."""
        self._blank(tier)
        self._upload(tier)

    def fill(
        self, tier: Tier, batch: RowBatch, pieces: Sequence[RowPiece], judged: IntArray
    ) -> None:
        """Write the inputs of one forward into the buffer for this size (`tier`), and upload them.

        The forward runs these `pieces` of the batch, each as a row of its own. `judged` are the
        tokens after which the target's choice is wanted, counted over all pieces.
        """
        inputs = self._blank(tier)
        first_token = 0
        first_block = 0
        for forward_row, piece in enumerate(pieces):
            size = piece.stop - piece.start
            self._write_row(inputs, forward_row, batch, piece)
            self._write_tokens(inputs, slice(first_token, first_token + size), batch, piece)
            inputs.token_row[first_token : first_token + size] = forward_row
            first_token += size
            # Rows of padding, behind the last one, are empty: they start where it ends.
            inputs.starts[forward_row + 1 :] = first_token
            # Attention takes the row's tokens in blocks.
            block_starts = np.arange(0, size, self._block)
            blocks = slice(first_block, first_block + len(block_starts))
            inputs.block_row[blocks] = forward_row
            inputs.block_first[blocks] = block_starts
            first_block = blocks.stop
        inputs.judged[: len(judged)] = judged
        self._upload(tier)

    def _write_row(
        self, inputs: ForwardInput[IntArray], forward_row: int, batch: RowBatch, piece: RowPiece
    ) -> None:
        """Write what a row of the forward attends to: how many tokens of its text come before this
        piece, and the pages of its slot."""
        slot = batch.slots[piece.row]
        inputs.lengths[forward_row] = self._length_before(batch, piece)
        pages_held = self._pool.pages_held[slot]
        inputs.table[forward_row, :pages_held] = self._pool.tables[slot, :pages_held]

    def _write_tokens(
        self, inputs: ForwardInput[IntArray], tokens: slice, batch: RowBatch, piece: RowPiece
    ) -> None:
        """Write the tokens of a piece to these places of the forward: what they are, where they
        stand in the text and in the cache, and which of each other they see."""
        row_start = int(batch.starts[piece.row])
        source = slice(row_start + piece.start, row_start + piece.stop)
        size = piece.stop - piece.start
        length = self._length_before(batch, piece)
        depths = np.arange(size)
        if size <= NODES:  # longer rows are chains
            parents = batch.parents[source] - piece.start  # counted within the piece
            depths, inputs.masks[tokens] = _ancestors(parents)
        inputs.ids[tokens] = batch.ids[source]
        inputs.positions[tokens] = length + depths
        in_text = np.arange(length, length + size)
        inputs.columns[tokens] = self._pool.columns(batch.slots[piece.row], in_text)

    def _length_before(self, batch: RowBatch, piece: RowPiece) -> int:
        """How many tokens of a slot's text are in the cache before this piece of a row: committed
        ones, and those of the pieces before it, which have run by now."""
        return self._pool.lengths[batch.slots[piece.row]] + piece.start

    def _blank(self, tier: Tier) -> ForwardInput[IntArray]:
        """Fill the host's array with inputs of this size that are all padding: tokens of no row,
        whose keys and values go to a page of no slot. Returns views of its parts, to be written
        to."""
        array = self._array[: self._size(tier)]
        array[:] = 0
        masks, *rest, table = np.split(array, np.cumsum(self._lengths(tier))[:-1])
        inputs: ForwardInput[IntArray] = ForwardInput._make(
            [masks.view(np.int64), *rest, table.reshape(tier.rows, -1)]
        )
        inputs.columns[:] = self._pool.pages * PAGE  # of the spare page, which is no slot's
        inputs.token_row[:] = -1
        inputs.block_row[:] = -1
        return inputs

    def _upload(self, tier: Tier) -> None:
        """Copy a tier's inputs to the device, without waiting for it."""
        size = self._size(tier)
        self._device[:size].copy_(self._host[:size], non_blocking=True)

    def _lengths(self, tier: Tier) -> list[int]:
        """The length of each part of the inputs of a forward of this size, in int32 numbers, in the
        order of `ForwardInput`."""
        rows, tokens, _ = tier
        # Attention takes a row's tokens in blocks. The last one of a row may not be full, so there
        # may be one more block for each row.
        blocks = rows + tokens // self._block
        return [
            2 * tokens,  # masks are int64
            *[tokens] * 5,
            rows + 1,
            rows,
            blocks,
            blocks,
            rows * self._pool.pages_per_slot,
        ]

    def _size(self, tier: Tier) -> int:
        """The int32 numbers that a tier's inputs take together."""
        return sum(self._lengths(tier))


def query_block(group: int) -> int:
    """The number of a row's tokens for which attention reads a key once. Each of them has `group`
    query heads that share the key's head; all of these together are the rows of one tile, at most
    64."""
    return max(1, min(16, 64 // power_of_two(group)))


def check_nodes(batch: RowBatch) -> None:
    """Raise a `UsageError` if a draft tree of the batch has more nodes than fit into a mask, which
    has one bit for each. A chain may be longer: it needs no mask."""
    for row, size in enumerate(batch.sizes):
        if size > NODES and not batch.chain(row):
            raise UsageError(
                f"slot {batch.slots[row]}: a tree has {NODES} nodes at most on an accelerator, not {size}"
            )


def cut(batch: RowBatch, most: int = MOST) -> list[list[RowPiece]]:
    """Cut a batch into forwards of at most `most` tokens each, and return the pieces of rows that
    each of them runs. The forwards run in this order: the pieces of a long row attend to those
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
    """Return the depth of each node of one sequence's draft tree, and its ancestor mask: bit j is
    set where node j is the node itself or one of its ancestors.

    A parent comes before its children. A parent below 0 is the text before the draft, which every
    node sees and no mask names. The kernel reads a mask as int64, so a tree has at most 64 nodes.
    """
    is_chain = bool((parents == np.arange(-1, len(parents) - 1)).all())
    if is_chain:  # its masks are known
        return np.arange(len(parents)), _CHAIN[: len(parents)]
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        own_bit = 1 << node
        if parent < 0:
            depths.append(0)
            masks.append(own_bit)
        else:
            depths.append(depths[parent] + 1)
            masks.append(masks[parent] | own_bit)
    return np.array(depths), np.array(masks, dtype=np.uint64).view(np.int64)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
