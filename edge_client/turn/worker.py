"""Runs the drafter for a turn, in small pieces, so that it does not block the event loop.

A step that is expected to take longer than a few milliseconds runs in the device's own thread,
where ONNX Runtime lets other threads run; a shorter one runs inline, because a thread switch would
take as long as the step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from edge_client.link.mailbox import Mailbox
from edge_client.turn.actions import Grow, Write
from edge_client.turn.controller import GUESSED, Controller
from edge_client.turn.step_thread import StepThread
from moa.errors import DeviceError
from moa.grammar.matcher import Matcher
from moa.graph.drafter import LONGEST_PIECE, OnnxDrafter
from moa.sampling import SamplingSettings
from moa.tree import DraftTree, TreeShape

BLOCKING = 0.005
"""Longest blocking of the event loop, in seconds."""
_UNWANTED_SECONDS = 1.0
"""How long a step goes on that nobody waits for any more."""
_ENDING_SECONDS = 2.0
"""How long a step may take to its next operator, where it ends."""
_SLICE = 0.05
"""Longest wait for a step in the thread, in seconds, before deadlines are looked at."""
_IDS = 2**31
"""Every token id is smaller than this."""
_TRIED = TreeShape(4, 3, 12)
"""A small tree, to measure the drafter's steps with."""
_DONE = object()
_PIECE = 16
"""A step over more new tokens than this runs a piece of a prompt."""


def time_steps(drafter: OnnxDrafter, controller: Controller) -> None:
    """Measure how long a step of the drafter takes over one token and over a few, and teach it the
    controller, which plans the first guesses by it."""
    # The first run allocates memory and is slow: it does not count.
    for measured_by in (Controller(), controller):
        steps = drafter.draft([0], _TRIED, SamplingSettings())
        done = False
        while not done:
            start = perf_counter()
            done = next(steps, _DONE) is _DONE
            measured_by.step.observe(drafter.run_tokens, perf_counter() - start)


@dataclass
class DrafterWorker:
    """Runs one conversation's drafter."""

    drafter: OnnxDrafter
    sampling: SamplingSettings
    controller: Controller
    thread: StepThread
    matcher: Matcher | None = None
    """Follows the grammar of the turn's answer."""
    failed: bool = False
    """Whether its caches can be trusted no longer: the next turn needs another drafter."""
    _steps: Generator[None, None, Any] | None = None
    """The steps of the current work that are still to be run."""
    _action: Grow | Write | None = None
    """The current work."""
    _length: int = 0
    """The length that its ids had when it began."""
    _seen: int = 0
    """Tokens that the drafter has seen, about."""
    _new: int = 0
    """Tokens that it has still to see, about."""
    _pending: asyncio.Future[tuple[bool, Any]] | None = None
    """The step that runs in the thread, or waits for it behind steps of other conversations."""
    _in_thread: Future[tuple[bool, Any]] | None = None
    """The same as the thread has it: this one tells a step that waits from one that runs."""
    _yield_at: float = 0.0
    """When the event loop must have had a turn, although every result is ready at once."""

    async def run(self, action: Grow | Write, box: Mailbox) -> Any:
        """Let the drafter work for a few milliseconds, or until a message arrives in the turn's
        mailbox. Returns its result once that is ready, the grown tree of guesses or the token to
        write, else None: the same action is then given again.

        Whatever the drafter raises becomes a `DeviceError`, and the drafter counts as failed.
        """
        try:
            if not self._is_about(action):  # other work than the last call's
                if self._pending is not None and not await self._landed(box):
                    # A step of earlier work, which must end before the caches are used again.
                    return None
                self._count_ended_step()
                self._begin(action)
            done, result = await self._run_steps(box)
            if done:
                _check(action, result)
            return result
        except Exception as error:
            self.failed = True
            self._end_work()
            self._give_up_step()
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"the drafter failed: {type(error).__name__}: {error}") from error

    def _begin(self, action: Grow | Write) -> None:
        """Make this action the current work."""
        self._action = action
        self._steps = self._steps_of(action)
        self._length = len(action.ids)
        self._new = self._length - self._seen

    def _end_work(self) -> None:
        """Have no current work: what comes next begins anew."""
        self._steps = None
        self._action = None

    def _count_ended_step(self) -> None:
        """Drop the result of a step of earlier work that has ended in the thread. If it was that
        work's last one, the drafter has read the text that it was for."""
        step = self._pending
        self._pending = None
        if step is None or step.cancelled() or step.exception() is not None:
            return
        done, _ = step.result()
        if done:
            self._seen = self._length

    @property
    def reading(self) -> tuple[int, int] | None:
        """While the drafter reads a long text: how many tokens it has read, and of how many."""
        if self._steps is None or self._new <= _PIECE:
            return None
        return max(0, self._length - self._new), self._length

    async def finish(self) -> None:
        """Wait for the step that still runs in the thread, or stop it, at the end of the turn: it
        must not change the drafter's caches under the next turn. A step that cannot be stopped
        fails the drafter; one that has not begun has changed nothing."""
        step = self._pending
        if step is None or self._in_thread is None:
            return
        await asyncio.wait([step], timeout=_UNWANTED_SECONDS)
        if self._in_thread.cancel():
            self._pending = None
            return
        if not self._in_thread.done():
            self.drafter.end_steps()  # ends the step after its present operator
        await asyncio.wait([step], timeout=_ENDING_SECONDS)
        self.failed |= not step.done() or step.exception() is not None
        self._give_up_step()

    def _steps_of(self, action: Grow | Write) -> Generator[None, None, Any]:
        """The drafter's steps for this action; the last one returns its result."""
        mask = self.matcher.after(action.ids) if self.matcher is not None else None
        match action:
            case Grow(ids, breadth, least):
                return self.drafter.grow(list(ids), breadth, least, self.sampling, mask)
            case Write(ids):
                return self.drafter.guess(list(ids), self.sampling, mask)

    def _is_about(self, action: Grow | Write) -> bool:
        """Whether this is the work that the last call has begun. A log that has grown since is
        other work, although it is the same list."""
        current = self._action
        if self._steps is None or current is None or type(current) is not type(action):
            return False
        if self._length != len(action.ids):
            return False
        return current.ids is action.ids or current.ids == action.ids

    async def _run_steps(self, box: Mailbox) -> tuple[bool, Any]:
        """Run steps of the current work until there is a result or `BLOCKING` seconds are over;
        returns whether there is a result, and the result. Short steps run here, long ones in the
        thread."""
        until = perf_counter() + BLOCKING
        while True:
            if self._pending is not None or self._step_seconds > BLOCKING:
                ended_step = await self._step_in_thread(box)
                if ended_step is None:
                    return False, None
                done, result = ended_step
            else:
                done, result = self._step()
            if done:
                self._seen = self._length
                self._end_work()
                if perf_counter() > self._yield_at:
                    # Short results in a row must not keep signals and messages waiting.
                    await asyncio.sleep(0)
                    self._yield_at = perf_counter() + BLOCKING
                return True, result
            if perf_counter() > until:
                await asyncio.sleep(0)
                return False, None

    async def _step_in_thread(self, box: Mailbox) -> tuple[bool, Any] | None:
        """Have the thread run a step, or go on waiting for the one that it runs. Returns what the
        step returned, None if it has not ended yet."""
        if self._pending is None:
            tokens = max(1, min(self._new, LONGEST_PIECE))
            usual = self.controller.reading_seconds(tokens)
            self._in_thread = self.thread.run_step(self._step, usual)
            self._pending = asyncio.wrap_future(self._in_thread)
            self._pending.add_done_callback(lambda _: box.news.set())
        if not await self._landed(box):
            return None
        ended_step = self._pending
        self._pending = None
        return ended_step.result()

    @property
    def _step_seconds(self) -> float:
        """Seconds that the next step is likely to take."""
        if self._new > _PIECE:
            return self.controller.piece
        return self.controller.step.seconds(GUESSED)

    def _step(self) -> tuple[bool, Any]:
        """Run one step of the current work and measure it, here or in the thread; returns whether
        the work is done, and its result."""
        assert self._steps is not None
        start = perf_counter()
        done = False
        result = None
        try:
            next(self._steps)
        except StopIteration as end:
            done = True
            result = end.value
        seconds = perf_counter() - start
        tokens = self.drafter.run_tokens
        if tokens > _PIECE:  # a piece of a prompt, which takes much longer than a step of a draft
            self.controller.ran_piece(tokens, seconds)
        else:
            self.controller.step.observe(tokens, seconds)
        self._new -= tokens
        return done, result

    def _give_up_step(self) -> None:
        """Do not run the step in the thread if it has not begun, and do not wait for it if it has."""
        if self._pending is not None and not self._pending.cancel():
            self._pending.add_done_callback(lambda step: step.cancelled() or step.exception())
        self._pending = None

    async def _landed(self, box: Mailbox) -> bool:
        """Whether the step in the thread is done. It is waited for only a moment, and no longer when
        a message arrives: the text of that is shown, and not kept behind the step. An error if the
        thread hangs, in this step or in one of another conversation before it."""
        assert self._pending is not None
        if not self._pending.done():
            await box.wait(_SLICE)
        if self._pending.done():
            return True
        if stuck := self.thread.stuck_for(perf_counter()):
            raise DeviceError(f"the drafter hangs: a step has taken {stuck:.0f} s")
        return False


def _check(action: Grow | Write, result: Any) -> None:
    """Raise a `DeviceError` if this cannot be the result of the action. A runtime or a graph may be
    broken, and what the drafter says goes to the user or to the verifier."""
    if isinstance(action, Write):
        if not 0 <= result < _IDS:
            raise DeviceError(f"the drafter failed: {result} is no token")
        return
    tree: DraftTree = result.tree
    if not _is_tree_after(tree, action.ids[-1]):
        raise DeviceError("the drafter failed: its tree does not follow the text")
    if len(tree) < 2:
        raise DeviceError("the drafter failed: it has no guess")


def _is_tree_after(tree: DraftTree, token: int) -> bool:
    """Whether this is a draft tree with the token as its root: each node comes behind its parent,
    ids and scores are possible ones."""
    if not len(tree.tokens) == len(tree.parents) == len(tree.scores):
        return False
    if tree.tokens[0] != token or tree.parents[0] != -1:
        return False
    if not all(0 <= parent < node for node, parent in enumerate(tree.parents) if node):
        return False
    return all(0 <= one < _IDS for one in tree.tokens) and all(map(math.isfinite, tree.scores))
