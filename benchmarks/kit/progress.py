"""Progress on standard error: how many steps are done, and about how long the others take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """So many steps of about the same length."""

    def __init__(self, total: int, what: str = "") -> None:
        self.total = total
        self.what = what
        self.done = 0
        self._began = time.perf_counter()

    def step(self, says: str = "") -> None:
        """One more is done; a long run says so about fifty times."""
        self.done += 1
        if self.done % max(1, self.total // 50) and self.done != self.total:
            return
        left = (time.perf_counter() - self._began) / self.done * max(0, self.total - self.done) / 60
        words = [
            f"{self.done}/{self.total} {self.what}".rstrip(),
            says,
            f"{left:.1f} min to go" if left else "",
        ]
        say(", ".join(word for word in words if word))


def steps(things: Iterable[T], what: str = "") -> Iterator[T]:
    """Each of them; after each it says how many there are left."""
    found = list(things)
    progress = Progress(len(found), what)
    for thing in found:
        yield thing
        progress.step(str(thing) if isinstance(thing, str | int | float) else "")
