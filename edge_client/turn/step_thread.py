"""The thread in which a device's drafters run long steps, and how a step that hangs is told from one
that is slow."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, TypeVar

STUCK = 30.0
"""Seconds that a step may take in any case. Before the first measurement nobody knows more."""
STUCK_TIMES = 20.0
"""Usual times of a step after which it counts as stuck: other programs on the same cores, the
engine that reads the same prompt among them, make it several times slower."""
R = TypeVar("R")


class _Running(NamedTuple):
    """The step that the thread runs."""

    since: float
    usual: float
    """Seconds that such a step usually takes."""


class StepThread(ThreadPoolExecutor):
    """One thread for the steps of all conversations, because several would only compete for the same
    cores. It knows since when its present step has been running: a step that waits for its turn
    cannot hang."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="drafter")
        self._running: _Running | None = None

    def run_step(self, step: Callable[[], R], usual: float) -> Future[R]:
        """Run a step that usually takes so many seconds, behind those that wait already."""

        def run() -> R:
            self._running = _Running(perf_counter(), usual)
            try:
                return step()
            finally:
                self._running = None

        return self.submit(run)

    def stuck_for(self, now: float) -> float:
        """Returns for how many seconds the present step has been running, if that is so much longer
        than usual that it will not end; else 0."""
        running = self._running
        if running is None:
            return 0.0
        seconds = now - running.since
        return seconds if seconds > max(STUCK, STUCK_TIMES * running.usual) else 0.0
