"""How far a build is: which part of it, how much of that, and how long the rest may take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa.cli.working import roughly

Notify = Callable[[str], None]
"""Gets a line for the user."""
Counted = Callable[[int, str], None]
"""Is told that so much of a part's work is done, and in words how far it is."""
_PRIOR = 0.1
"""The weight of what was expected of the whole, beside the parts that were measured."""
_SMOOTH = 0.1
"""The time, as a share of the whole build's, in which what is said of the rest follows what is
known of it: a part that is shorter than expected makes it jump else."""
_LEAST_SMOOTH_SECONDS = 5.0
_STEADY = 0.8
"""The share of what is counted next up to which time alone goes on steadily."""


def silent(_: str) -> None:
    """Tell nobody."""


def uncounted(_: int, __: str) -> None:
    """Count nothing."""


@dataclass(frozen=True)
class Part:
    """A part of a build."""

    doing: str
    """What is said of it."""
    seconds: float
    """How long it takes, about: how long it does take here is learnt from the parts before it. 0
    where nobody knows it: then nothing is said of the time that is left."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Work in the seconds that were expected of it."""

    whole: float
    done: float
    step: float
    """What runs now, until it is counted."""


class Progress:
    """Tells how far a build is. How long the rest may take follows from what was expected of the
    parts, and from how long those took that are done: so it holds on a slow or busy machine, too.
    Several threads may call it."""

    def __init__(
        self,
        parts: Sequence[Part],
        say: Notify = silent,
        show: Notify = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` gets a line at the beginning of each part, and `show` the lines within a part, each
        of which takes the place of the one before."""
        self._parts = list(parts)
        self._say = say
        self._show = show
        self._clock = clock
        self._lock = threading.Lock()
        self._started = clock()
        self._current = -1
        """The index of the part that runs."""
        self._total = 0
        """How much work that part is, in whatever is counted; 0 where nothing is."""
        self._done = 0
        """How much of it is done."""
        self._step = 0
        """How much was counted last."""
        self._counted_at = self._started
        """When that was, or when the part began."""
        self._what = ""
        """How far it is, in words."""
        self._share = 0.0
        """The share of the whole that was told."""
        self._left: float | None = None
        """How long the rest may take, as it was told."""
        self._told_at = self._started

    def begin(self, total: int = 0) -> None:
        """Go on to the next part, which is so much work."""
        with self._lock:
            self._current += 1
            self._total = total
            self._done = self._step = 0
            self._what = ""
            self._counted_at = self._clock()
            self._say(self._line(self._counted_at))

    def count(self, amount: int, what: str) -> None:
        """Count so much of the part's work as done; `what` says how far it is."""
        with self._lock:
            self._done += amount
            self._step = amount
            self._what = f": {what}"
            self._counted_at = self._clock()
            self._show(self._line(self._counted_at))

    def tick(self) -> None:
        """Show that the part goes on, and how long the whole has taken."""
        with self._lock:
            if self._current >= 0:
                self._show(self._line(self._clock()))

    def _line(self, now: float) -> str:
        """A line on the part that runs, with how much of all is done, how long that has taken and
        how long the rest may take."""
        line = self._parts[self._current].doing + self._what
        taken = now - self._started
        if not all(part.seconds for part in self._parts):
            return f"{line} ({taken:.0f} s)" if taken >= 1 else line
        share, left = self._estimate(now)
        self._share = max(self._share, share)
        if self._left is not None:
            passed = now - self._told_at
            smooth = max(_LEAST_SMOOTH_SECONDS, _SMOOTH * (taken + left))
            before = max(0.0, self._left - passed)
            left += (before - left) * math.exp(-passed / smooth)
        self._left = left
        self._told_at = now
        if self._share >= 1:
            return line
        return f"{line} ({self._share:.0%}, {taken:.0f} s, about {roughly(left)} s left)"

    def _estimate(self, now: float) -> tuple[float, float]:
        """The share of the work that is done, and the seconds that the rest takes, as far as is
        known by now."""
        work = self._work()
        running = now - self._counted_at
        pace = self._pace(work, running)
        done = work.done
        if work.step:
            done += work.step * _approached(running / (pace * work.step))
        return done / work.whole, pace * (work.whole - done)

    def _work(self) -> _Work:
        """What was expected of the whole, of what is done, and of the step that runs."""
        seconds = [part.seconds for part in self._parts]
        part = seconds[self._current]
        counted = min(1.0, self._done / self._total) if self._total else 0.0
        # A step is expected to be as large as the one before it; until something is counted, it is
        # all of the part.
        share = min(1.0 - counted, self._step / self._total if self._step else 1.0)
        return _Work(
            whole=sum(seconds),
            done=sum(seconds[: self._current]) + counted * part,
            step=share * part,
        )

    def _pace(self, work: _Work, running: float) -> float:
        """Seconds that a second of what was expected takes here, `running` seconds into a step."""
        expected = _PRIOR * work.whole + work.done
        measured = _PRIOR * work.whole + self._counted_at - self._started
        pace = measured / expected
        if running <= pace * work.step:
            return pace
        # The step takes longer than expected, and so may the rest.
        return (measured + running) / (expected + work.step)


def _approached(passed: float) -> float:
    """The share of a step that is done when the time that was expected of it has `passed` so many
    times. It comes near 1 and never reaches it: a step ends when it is counted."""
    if passed <= _STEADY:
        return passed
    rest = 1 - _STEADY
    return 1 - rest * math.exp(-(passed - _STEADY) / rest)
