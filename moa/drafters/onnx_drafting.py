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
        """`drafter`, which the graph was made of, makes the records; a sibling reads none."""
        self._drafter = drafter
        self._loaded = loaded
        self._slots = slots
        self._left: list[OnnxDrafter] = []
        """Of slots that were given back."""
        self._used: dict[int, tuple[OnnxDrafter, list[int]]] = {}
        """Drafters and the tokens that they have read, by slot."""
        self._due: dict[int, list[Committed]] = {}
        """Observed tokens whose records have not been made, by slot."""
        self._states: dict[int, StatesBefore] = {}
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
        """The positions whose records it has."""
        records = self._used[slot][0].records
        return records.held if records is not None else Ranges()

    def open(self) -> int:
        """Take an empty slot."""
        if not self.free:
            raise FullError(f"all {self._slots} slots of the drafter are in use")
        slot = next(number for number in count() if number not in self._used)
        self._used[slot] = self._left.pop() if self._left else self._loaded.drafter(), []
        self._due[slot] = []
        self._states[slot] = StatesBefore()
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        graph, _ = self._used.pop(slot)
        del self._due[slot]
        del self._states[slot]
        if graph.records is not None:
            graph.records.truncate(0)
        self._left.append(graph)

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """The target has run `tokens`: store the graph's keys and values, and make records when
        they are many."""
        if self._drafter is not None and self.reads_records:
            due = self._due[slot]
            due.append(self._states[slot].of(committed) if self._drafter.taps else committed)
            if committed.stop - due[0].start > self.record_lag:
                whole = Committed.joined(due)
                self.give(slot, whole.start, *self._drafter.records([whole]))
                due.clear()
        self.read(slot, tokens)

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """The newest range within start..stop whose records it has not."""
        return self.held(slot).newest_missing(stop, stop - start, start)

    def give(self, slot: int, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store records of positions from `start` on."""
        if (records := self._used[slot][0].records) is not None:
            records.put(start, keys, values)

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Compute the keys and values of more tokens of its sequence."""
        graph, ids = self._used[slot]
        ids += tokens
        run(graph.read(ids))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request."""
        trees = []
        for request in requests:
            graph, ids = self._used[request.slot]
            text = [*ids, request.pending]
            trees.append(run(graph.draft(text, request.shape, request.sampling, request.grammar)))
        return trees
