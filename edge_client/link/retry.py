"""When to retry: one back-off rule for everything that the device repeats. No clock and no I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_WAIT = 300.0
"""Seconds. The longest pause that a verifier may ask for."""


@dataclass(slots=True)
class Retry:
    """Counts attempts in a row without progress. The pause doubles from `first` to `longest`
    seconds.

    Each pause is random between half and all of that: a thousand devices that lost the same cell
    must not return at the same instant.
    """

    first: float
    longest: float
    jitter: Callable[[], float] = random.random
    attempts: int = 0
    not_before: float = 0.0

    def failed(self, now: float, *, asked_wait: float = 0.0) -> None:
        """Note that an attempt failed, and set when the next one may begin. The other end may have
        asked for a pause of `asked_wait` seconds, which is kept, or made a little longer."""
        doublings = min(self.attempts, 30)  # so that the power stays a number
        pause = min(self.longest, self.first * 2.0**doublings)
        pause *= 0.5 + 0.5 * self.jitter()
        asked_pause = min(asked_wait, LONGEST_WAIT) * (1 + 0.25 * self.jitter())
        self.attempts += 1
        self.not_before = now + max(pause, asked_pause)

    def progressed(self) -> None:
        """Note progress: the next failure counts as the first again."""
        self.attempts = 0
        self.not_before = 0.0
