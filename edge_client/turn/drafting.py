"""The drafts of a turn: the one that is being verified, and the next, begun while its answer is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from edge_client.drafter.ahead import DraftAhead
from edge_client.drafter.onnx import Drafter
from edge_client.tools.trace import Trace
from edge_client.turn.controller import Controller
from edge_client.turn.stats import Stats
from moa.sampling import SamplingSettings
from moa.tree import DraftTree, TreeShape

_BREATH = 0.005
"""Seconds of drafting after which the network is looked at: doing so costs as much as a step of a small drafter."""


@dataclass
class Drafting:
    """Makes drafts and keeps the books about them."""

    drafter: Drafter
    controller: Controller
    sampling: SamplingSettings
    stats: Stats
    trace: Trace
    ahead: bool = True
    """Draft on while an answer is awaited."""
    asked: DraftTree | None = None
    """The draft that is being verified."""
    _next: DraftAhead | None = None

    def forget(self) -> None:
        """The log went on in another way."""
        self.asked = self._next = None

    async def make(self, ids: Sequence[int], shape: TreeShape, alive: Callable[[], bool]) -> DraftTree | None:
        """A draft after `ids`, perhaps one made while waiting; None when it is not wanted any more."""
        draft, self._next = self._next, None
        if draft is not None:
            hit = draft.matches(ids)
            self.controller.ahead_hits.add(float(hit))
            self.stats.ahead_hits += hit
            draft = draft if hit else None
        with self.trace.span("draft", ahead=draft is not None):
            draft = draft or DraftAhead.after(self.drafter, ids, shape, self.sampling)
            breath = perf_counter()
            while not draft.step(self.controller):
                if perf_counter() - breath > _BREATH:
                    await asyncio.sleep(0)
                    if not alive():
                        return None
                    breath = perf_counter()
        if draft.tree is not None:
            self.stats.drafted += len(draft.tree) - 1
        return draft.tree

    def step_ahead(self, log: Sequence[int], shape: TreeShape) -> bool:
        """One step of the draft for the most likely outcome; False when there is nothing left to draft."""
        if not self.ahead or self.asked is None or len(self.asked) < 2:
            return False
        if self._next is None:
            self._next = DraftAhead.beyond(self.drafter, log, self.asked, shape, self.sampling)
        if self._next.tree is not None:
            return False
        with self.trace.span("draft ahead"):
            self._next.step(self.controller)
        return True
