"""What an edge foresees for its running stream. The event loop adds, the model's thread takes. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moa.foresight import Foreseen, Picked
from moa.wire.messages import Foresee

_MOST_WAITING = 64
"""Messages that wait to be looked at; of more the oldest are dropped."""
_ENOUGH = 1.0
"""Accepted nodes that a draft of the edge must promise, where the server could draft in its place."""


class Guesses:
    """Of one stream round. Appending to a deque needs no lock."""

    def __init__(self) -> None:
        self._arrived: deque[Foresee] = deque(maxlen=_MOST_WAITING)
        self._foreseen = Foreseen()

    @property
    def waiting(self) -> bool:
        """Whether there is something that the model's thread has not looked at."""
        return bool(self._arrived)

    def add(self, message: Foresee) -> None:
        """The event loop's side."""
        self._arrived.append(message)

    def pick(self, ids: Sequence[int], most: int, least: float) -> Picked:
        """The thread's side: the best draft after these ids; the pending token alone where nothing was foreseen."""
        while self._arrived:
            new = self._arrived.popleft()
            self._foreseen.add(ids, new.base, new.tokens, new.parents, new.doubts)
        self._foreseen.follow(ids)
        return self._foreseen.pick(most, least)


def worthwhile(picked: Picked, *, alone: bool) -> bool:
    """Whether to verify this draft of the edge; `alone`: nobody else would draft."""
    return len(picked.tokens) > 1 and (alone or picked.expected >= _ENOUGH)
