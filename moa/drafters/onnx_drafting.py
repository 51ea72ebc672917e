"""Drafting beside a target on a CPU, with the device's own graph: quantized, and one call a step,
where torch computes the same step in float32 with a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from numpy.typing import NDArray

from moa.drafters.contract import Drafter, DraftRequest, StatesBefore
from moa.errors import FullError
from moa.graph.drafter import OnnxDrafter, run
from moa.graph.load import LoadedGraph
from moa.target.torch_target import Committed
from moa.tree import DraftTree
from moa.wire import Ranges


class OnnxDrafting:
    """`Drafting` by an exported graph. It drafts for one sequence after another: on a CPU a batch
    would gain little."""

    def __init__(self, drafter: Drafter | None, loaded: LoadedGraph, *, slots: int = 1) -> None:
        """Draft with an exported graph for up to `slots` texts. `drafter` is the torch module that
        the graph was made of: it makes the activation records that the graph reads. It is None for
        a sibling, a language model that reads none."""
        self._drafter = drafter
        self._loaded = loaded
        self._slots = slots
        self._unused: list[OnnxDrafter] = []
        """Drafters of slots that were given back, to be used again: their memory is there."""
        self._used: dict[int, tuple[OnnxDrafter, list[int]]] = {}
        """By slot its drafter, and the tokens that it has read."""
        self._due: dict[int, list[Committed]] = {}
        """By slot the observed tokens whose records have not been made yet."""
        self._states: dict[int, StatesBefore] = {}
        """By slot the newest of the target's states, which the next records may need."""
        self.reads_records = drafter is not None and drafter.record_layout is not None
        self.record_lag = drafter.record_lag if drafter is not None else 0

    @property
    def free(self) -> bool:
        """Whether there is an empty slot."""
        return len(self._used) < self._slots

    def known(self, slot: int) -> int:
        """How many tokens of its sequence a slot has read."""
        return len(self._used[slot][1])

    def held(self, slot: int) -> Ranges:
        """The positions whose records a slot has."""
        records = self._used[slot][0].records
        return records.held if records is not None else Ranges()

    def open(self) -> int:
        """Take an empty slot, the memory of one text; a `FullError` where there is none."""
        if not self.free:
            raise FullError(f"all {self._slots} slots of the drafter are in use")
        slot = next(number for number in count() if number not in self._used)
        # A drafter that was used before has its memory already.
        graph = self._unused.pop() if self._unused else self._loaded.drafter()
        self._used[slot] = (graph, [])
        self._due[slot] = []
        self._states[slot] = StatesBefore()
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back; its drafter forgets its records, and is kept for another slot."""
        graph, _ = self._used.pop(slot)
        del self._due[slot]
        del self._states[slot]
        if graph.records is not None:
            graph.records.truncate(0)
        self._unused.append(graph)

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read `tokens`, which the target has run, with what it `committed` for them.

        The activation records that the graph reads are made for several pieces at once, which is
        cheaper: when more of the latest tokens lack them than the drafter has learnt to do without
        (`record_lag`).
        """
        if self._drafter is not None and self.reads_records:
            if self._drafter.taps:
                committed = self._states[slot].of(committed)
            due = self._due[slot]
            due.append(committed)
            if committed.stop - due[0].start > self.record_lag:
                whole = Committed.joined(due)
                keys, values = self._drafter.records([whole])
                self.give(slot, whole.start, keys, values)
                due.clear()
        self.read(slot, tokens)

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """The newest range of positions within start..stop whose records a slot lacks; None if it
        has all."""
        return self.held(slot).newest_missing(stop, stop - start, start)

    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store records of a slot's positions from `start` on, if its drafter reads any."""
        records = self._used[slot][0].records
        if records is not None:
            records.put(start, keys, values)

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Compute the keys and values of more tokens of a slot's text."""
        graph, ids = self._used[slot]
        ids += tokens
        run(graph.read(ids))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft a tree of guesses for each request, one after another: on a CPU a batch would gain
        little."""
        trees = []
        for request in requests:
            graph, ids = self._used[request.slot]
            text = [*ids, request.pending]
            trees.append(run(graph.draft(text, request.shape, request.sampling, request.grammar)))
        return trees
