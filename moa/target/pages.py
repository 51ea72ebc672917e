"""The target's KV cache: pages of a few tokens; a sequence holds as many as it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moa.errors import FullError, UsageError
from moa.target.rows import IntArray
from moa.target.slots import Slots

PAGE = 16
"""Tokens of a page: the most that a sequence wastes, and the unit of reading."""

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of a layer, `[columns, kv_heads, head_dim]` each: a column for each token."""


class PagePool(Slots):
    """Keys and values of every layer, `[layers, columns, kv_heads, head_dim]`, allocated once; on a
    CPU the system gives memory to what has been written.

    A sequence (`slot`) takes a page when it needs one. Its first `lengths[slot]` tokens are its
    committed prefix, which never changes; the tokens behind them are scratch of the last forward.
    So a rejected draft needs no clean-up, and whole pages of a prefix can be shared: a page is free
    when the last sequence that holds it is released.
    """

    page_tokens = PAGE
    pages: int
    """Of all slots."""
    memories: list[Tensor]
    """Keys, then values, of the layers of one shape: `[layers, columns, kv_heads, head_dim]`."""
    layers: list[LayerCache]
    """Keys and values of each layer."""
    pages_held: list[int]
    """Pages in each slot's table."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        tokens: int = 0,
        spare: int = 0,
        shapes: Sequence[tuple[int, int]] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Memory for `slots` sequences of up to `capacity` tokens, and `tokens` in total (0: all
        slots full). `spare` pages behind the last one belong to no slot: forwards of a fixed size
        write their padding there. `shapes` are the KV heads and head widths of layers that differ,
        in place of `layers`, `kv_heads` and `head_dim`."""
        if tokens < 0:
            raise UsageError(f"a KV cache cannot hold {tokens} tokens")
        self.pages_per_slot = pages_for(capacity)
        self.pages = pages_for(tokens) if tokens else slots * self.pages_per_slot
        super().__init__(slots, min(capacity, self.pages * PAGE))
        self.memories, self.layers = _memories(
            shapes=list(shapes) or [(kv_heads, head_dim)] * layers,
            columns=(self.pages + spare) * PAGE,
            dtype=dtype,
            device=torch.device(device),
        )
        self.uniform = len(self.memories) == 2
        """Whether all layers are of one shape."""
        self.k, self.v = self.memories[:2]
        """Keys and values of all layers, if they are."""
        self.tables: IntArray = np.zeros((slots, self.pages_per_slot), dtype=np.int64)
        """The pages of each slot, in order; what is behind `pages_held` of them means nothing."""
        self.versions = [0] * slots
        """Counts the changes of a slot, so that a result of an older forward cannot be committed."""
        self.pages_held = [0] * slots
        self.contiguous = [True] * slots
        """Whether a slot's pages are contiguous, so that it can be read without a copy."""
        self._users = np.zeros(self.pages, dtype=np.int32)
        """How many slots hold each page."""
        self._free_pages = self.pages

    @property
    def free_pages(self) -> int:
        """Pages that no slot holds."""
        return self._free_pages

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token."""
        return sum(memory[:, 0].numel() * memory.element_size() for memory in self.memories)

    @property
    def nbytes(self) -> int:
        """Memory of all pages."""
        return self.pages * PAGE * self.bytes_per_token

    # ---- sequences

    def share(self, source: int, tokens: int) -> int:
        """Take an empty slot, and let it begin with the first `tokens` of the slot `source`. Whole
        pages of keys and values are shared between the two; what is left, less than a page, is
        copied, because the new slot will write behind it."""
        self.check_taken(source)
        self.check_shareable(source, tokens)
        slot = self.acquire()
        whole_pages = tokens // PAGE
        rest = tokens % PAGE
        self._share_pages(source, slot, whole_pages)
        if rest:
            try:
                self.begin([slot], [rest])
            except BaseException:
                self.release(slot)  # whatever it is: else the slot is lost
                raise
            last = whole_pages  # the place of the last page in both tables
            self._copy_page(int(self.tables[source, last]), int(self.tables[slot, last]), rest)
        self.lengths[slot] = tokens
        return slot

    def _share_pages(self, source: int, slot: int, count: int) -> None:
        """Let an empty slot begin with the first `count` pages of another one."""
        pages = self.tables[source, :count]
        self.tables[slot, :count] = pages
        self._users[pages] += 1
        self.pages_held[slot] = count
        self.lengths[slot] = count * PAGE
        if count:
            # Pages that are in order and without gaps can be read without a copy.
            is_run = bool(pages[-1] - pages[0] == count - 1)
            self.contiguous[slot] = is_run and self.contiguous[source]

    def _copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first `tokens` of one page to another."""
        from_column = source * PAGE
        to_column = target * PAGE
        for memory in self.memories:
            copied = memory[:, from_column : from_column + tokens]
            memory[:, to_column : to_column + tokens] = copied

    def release(self, slot: int) -> None:
        """Release a slot, and its pages of keys and values. A page that no slot holds any more is
        zeroed, so that its next user finds no data; others are shared, and stay."""
        self.check_taken(slot)
        pages = self.tables[slot, : self.pages_held[slot]]
        self._users[pages] -= 1
        unused = pages[self._users[pages] == 0]
        if len(unused):
            pages_to_zero = torch.from_numpy(unused).to(self.k.device)
            for memory in self.memories:
                memory.unflatten(1, (-1, PAGE)).index_fill_(1, pages_to_zero, 0)
        self._free_pages += len(unused)
        self.pages_held[slot] = 0
        self.contiguous[slot] = True
        self.versions[slot] += 1
        self._give_back(slot)

    # ---- what a forward does

    def begin(self, slots: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Give each of `slots` pages for as many more tokens as `sizes` says; where one cannot have
        them, raise a `FullError` or `CapacityError` and change nothing. Returns the slots'
        versions, which count their changes: a forward may be committed only while they are the
        same."""
        self.check_room(slots, sizes)
        more_pages = []
        for slot, size in zip(slots, sizes, strict=True):
            missing = pages_for(self.lengths[slot] + size) - self.pages_held[slot]
            more_pages.append(max(0, missing))
        if sum(more_pages) > self._free_pages:
            raise FullError(
                f"the target's key/value memory is full: {sum(more_pages)} more pages of {PAGE} tokens are needed, "
                f"{self._free_pages} of {self.pages} are free"
            )
        for slot, count in zip(slots, more_pages, strict=True):
            for _ in range(count):
                self._grow(slot)
            self.versions[slot] += 1
        return [self.versions[slot] for slot in slots]

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Append tokens of the slot's latest forward, the accepted `nodes` of its draft in this
        order, to the slot's text. Their keys and values are moved up where those of rejected nodes
        lay between them."""
        start = self.lengths[slot]
        end = start + len(nodes)
        are_the_first = list(nodes) == list(range(len(nodes)))
        if not are_the_first:  # else they are where they belong
            sources = self._column_index(slot, start + np.asarray(nodes, dtype=np.int64))
            destinations = self._column_index(slot, np.arange(start, end))
            for memory in self.memories:
                memory.index_copy_(1, destinations, memory.index_select(1, sources))
        self.lengths[slot] = end
        self.versions[slot] += 1

    def read(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[layers, tokens, kv_heads, head_dim]` of a slot's tokens `start` to
        `stop`: views if its pages are contiguous, else copies."""
        if self.contiguous[slot]:
            first_column = PAGE * int(self.tables[slot, 0])
            span = slice(first_column + start, first_column + stop)
            return self.k[:, span], self.v[:, span]
        columns = self._column_index(slot, np.arange(start, stop))
        return self.k.index_select(1, columns), self.v.index_select(1, columns)

    def columns(self, slots: IntArray | int, positions: IntArray) -> IntArray:
        """The columns (places in the pool's memory) of the tokens at `positions` of `slots`, or of
        one slot."""
        return self.tables[slots, positions // PAGE] * PAGE + positions % PAGE

    def _column_index(self, slot: int, positions: IntArray) -> Tensor:
        """The columns of a slot's positions, as an index on the device."""
        return torch.from_numpy(self.columns(slot, positions)).to(self.k.device)

    def _grow(self, slot: int) -> None:
        """Give a slot one more page: the one behind its last, if that is free, so that the slot can
        be read without a copy; else one that is followed by many free ones."""
        held = self.pages_held[slot]
        table = self.tables[slot]
        if held == 0:
            page = self._roomiest()
        else:
            page = int(table[held - 1]) + 1
            if page >= self.pages or self._users[page]:
                self.contiguous[slot] = False
                page = self._roomiest()
        table[held] = page
        self.pages_held[slot] = held + 1
        self._users[page] = 1
        self._free_pages -= 1

    def _roomiest(self) -> int:
        """The free page from which a sequence can grow the furthest without a gap. It lies in the
        longest run of free pages: so far from its end that a full sequence fits, or, if the run is
        shorter than that, in its middle, so that the sequence before it can grow too."""
        free = np.flatnonzero(self._users == 0)
        # Where in `free` each run of contiguous pages ends, and how long it is.
        run_ends = np.append(np.flatnonzero(np.diff(free) > 1), len(free) - 1)
        run_lengths = np.diff(run_ends, prepend=-1)
        longest = int(run_lengths.argmax())
        length = int(run_lengths[longest])
        after_run = int(free[run_ends[longest]]) + 1
        if length >= self.pages_per_slot:
            return after_run - self.pages_per_slot
        return after_run - (length + 1) // 2


def pages_for(tokens: int) -> int:
    """The number of pages that `tokens` take; the last one may not be full."""
    return math.ceil(tokens / PAGE)


def _memories(
    *,
    shapes: Sequence[tuple[int, int]],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Tensor], list[LayerCache]]:
    """Allocate keys and values of layers with these numbers of heads and widths. Layers of one
    shape share a tensor for keys and one for values. Returns these tensors, and their part for each
    layer."""
    memories: list[Tensor] = []
    by_layer: dict[int, LayerCache] = {}
    for shape in dict.fromkeys(shapes):  # each once
        layers_alike = [layer for layer, its_shape in enumerate(shapes) if its_shape == shape]
        memory_shape = (len(layers_alike), columns, *shape)
        keys = _zeros(memory_shape, dtype, device)
        values = _zeros(memory_shape, dtype, device)
        memories += [keys, values]
        for index, layer in enumerate(layers_alike):
            by_layer[layer] = (keys[index], values[index])
    return memories, [by_layer[layer] for layer in range(len(shapes))]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU none is written: numpy asks the system for memory that it promises
    to be zero, and gives page by page as it is used. `torch.zeros` would take all of it at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
