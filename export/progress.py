"""How far a build is: which part of it, how much of that, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Notify = Callable[[str], None]
"""Gets a line for the user."""
Counted = Callable[[int, str], None]
"""Is told that so much of a part's work is done, and in words how far it is."""


def silent(_: str) -> None:
    """Tell nobody."""


def uncounted(_: int, __: str) -> None:
    """Count nothing."""


@dataclass(frozen=True)
class Part:
    """A part of a build."""

    doing: str
    """What is said of it."""
    share: float
    """Its time, beside that of the others: only their ratio counts. 0 where nobody knows it: then
    nothing is said of the time that is left."""


@dataclass
class Progress:
    """Tells how far a build is. How long the rest may take follows from the time that was taken and
    from the shares of the parts: so it holds on a slow or busy machine, too."""

    parts: Sequence[Part]
    say: Notify = silent
    """Gets a line at the beginning of each part."""
    show: Notify = silent
    """Gets the lines within a part, each of which takes the place of the one before."""
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _current: int = -1
    """The index of the part that runs."""
    _total: int = 0
    """How much work that part is, in whatever is counted; 0 where nothing is."""
    _done: int = 0
    """How much of it is done."""

    def __post_init__(self) -> None:
        self._started = self.clock()

    def begin(self, total: int = 0) -> None:
        """Go on to the next part, which is so much work."""
        self._current += 1
        self._total = total
        self._done = 0
        self.say(self._line())

    def count(self, amount: int, what: str) -> None:
        """Count so much of the part's work as done; `what` says how far it is."""
        self._done += amount
        self.show(self._line(f": {what}"))

    def _line(self, what: str = "") -> str:
        """A line on the part that runs, with how much of all is done and how long the rest may
        take."""
        line = self.parts[self._current].doing + what
        shares = [part.share for part in self.parts]
        if not all(shares):
            return line
        of_part = min(1.0, self._done / self._total) if self._total else 0.0
        done = sum(shares[: self._current]) + of_part * shares[self._current]
        done /= sum(shares)
        if not 0 < done < 1:
            return line
        left = (self.clock() - self._started) * (1 - done) / done
        return f"{line} ({done:.0%}, about {left:.0f} s left)"
