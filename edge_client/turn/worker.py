"""Runs the drafter for a turn, in small pieces, so that it does not block the event loop.

A step that is expected to take longer than a few milliseconds runs in the device's own thread, where ONNX Runtime lets
other threads run; a shorter one runs inline, because a thread switch would take as long as the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from edge_client.turn.actions import Draft, Grow
from edge_client.turn.controller import Controller
from moa.graph.drafter import DeviceDrafter
from moa.sampling import SamplingSettings
from moa.speculation.guess_tree import GuessTreeGrower
from moa.tree import DraftTree, TreeShape

BLOCKING = 0.005
"""Longest blocking of the event loop, in seconds."""
DrafterTask = Literal["draft", "grow", "guess"]
_TRIED = TreeShape(4, 3, 12)
_DONE = object()
_PIECE = 16
"""New tokens above which a step runs a piece of a prompt."""


@dataclass
class StepDurations:
    """How long the steps of a drafter take here; shared by all conversations of a device."""

    level: float = 0.0
    """Seconds of a step over a few tokens."""
    piece: float = float("inf")
    """Seconds of a step over a piece of a prompt; unknown before the first."""

    def took(self, tokens: int, seconds: float) -> None:
        """A step is done."""
        if tokens > _PIECE:
            self.piece = seconds
        else:
            self.level += (seconds - self.level) / 4


def time_steps(drafter: DeviceDrafter, controller: Controller) -> None:
    """Measure the drafter's steps, over one token and over a few, before the first draft is planned."""
    for books in (Controller(), controller):  # the first run allocates memory and is slow: it does not count
        steps, done = drafter.draft([0], _TRIED, SamplingSettings()), False
        while not done:
            start = perf_counter()
            done = next(steps, _DONE) is _DONE
            books.drafted(drafter.run_tokens, perf_counter() - start)


@dataclass
class DrafterWorker:
    """Runs one conversation's drafter."""

    drafter: DeviceDrafter
    sampling: SamplingSettings
    controller: Controller
    step_durations: StepDurations
    thread: Executor
    _steps: Generator[None, None, Any] | None = None
    _ids: Sequence[int] | None = None
    """The current work, and the length of its ids."""
    _length: int = 0
    _what: DrafterTask = "draft"
    _seen: int = 0
    """Tokens that the drafter has seen, about."""
    _new: int = 0
    """Tokens that it has still to see, about."""

    async def draft(self, draft: Draft) -> DraftTree | None:
        """Work on a draft for a few milliseconds; returns the tree when it is ready."""
        if not self._is_about(draft.ids, "draft"):
            self._begin(draft.ids, self.drafter.draft(list(draft.ids), draft.shape, self.sampling), "draft")
        tree: DraftTree | None = await self._work()
        return tree

    async def grow(self, grow: Grow) -> GuessTreeGrower | None:
        """Work on the tree of guesses for a few milliseconds; the tree, once it has grown."""
        if not self._is_about(grow.ids, "grow"):
            steps = self.drafter.grow(list(grow.ids), grow.breadth, grow.least, self.sampling)
            self._begin(grow.ids, steps, "grow")
        growth: GuessTreeGrower | None = await self._work()
        return growth

    async def guess(self, ids: Sequence[int]) -> int | None:
        """Work on the likeliest token after `ids` for a few milliseconds; returns it when it is known."""
        if not self._is_about(ids, "guess"):
            self._begin(ids, self.drafter.guess(list(ids), self.sampling), "guess")
        token: int | None = await self._work()
        return token

    def _is_about(self, ids: Sequence[int], what: DrafterTask) -> bool:
        """Whether this is the current work; a log grows in place and is then different work."""
        if self._steps is None or self._what != what or self._length != len(ids):
            return False
        return self._ids is ids or self._ids == ids

    def _begin(self, ids: Sequence[int], steps: Generator[None, None, Any], what: DrafterTask) -> None:
        self._ids, self._steps, self._length, self._what = ids, steps, len(ids), what
        self._new = len(ids) - self._seen

    async def _work(self) -> Any:
        """Run steps until there is a result or the time is over."""
        assert self._steps is not None
        until = perf_counter() + BLOCKING
        while True:
            expected = self.step_durations.piece if self._new > _PIECE else self.step_durations.level
            done, result = await self._in_thread() if expected > BLOCKING else self._step()
            if done:
                self._seen, self._steps, self._ids = self._length, None, None
                return result
            if perf_counter() > until:
                await asyncio.sleep(0)
                return None

    def _step(self) -> tuple[bool, Any]:
        assert self._steps is not None
        start = perf_counter()
        done, result = False, None
        try:
            next(self._steps)
        except StopIteration as end:
            done, result = True, end.value
        seconds, tokens = perf_counter() - start, self.drafter.run_tokens
        self.step_durations.took(tokens, seconds)
        if tokens <= _PIECE:
            self.controller.drafted(tokens, seconds)
        self._new -= tokens
        return done, result

    async def _in_thread(self) -> tuple[bool, Any]:
        step = asyncio.get_running_loop().run_in_executor(self.thread, self._step)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])  # the drafter's caches must not change under the next turn
            raise
