"""An edge's guesses for its running stream. The event loop adds them, the model's thread takes them. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moa.speculation.guess_tree import GuessTree, Picked
from moa.wire.messages import Foresee

_MOST_WAITING = 64
"""Most messages that may wait; the oldest are dropped."""
_USEFUL = 32
"""Messages that count as work between two advances of a stream. More of them spend the connection's budget."""


class Guesses:
    """The guesses of one stream round. Appending to a deque needs no lock."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        """Whether the stream waits where no guess fits. The event loop writes it, the model's thread reads it."""
        self._arrived: deque[Foresee] = deque(maxlen=_MOST_WAITING)
        self._tree = GuessTree()
        self._since_advance = 0

    @property
    def waiting(self) -> bool:
        """Whether there are guesses that the model's thread has not read."""
        return bool(self._arrived)

    def add(self, message: Foresee) -> bool:
        """Called by the event loop. Whether the message counts as work."""
        if message.waits is not None:
            self.waits = message.waits  # first, so that who reads the guesses knows what to do without them
        self._arrived.append(message)
        self._since_advance += 1
        return self._since_advance <= _USEFUL

    def advanced(self) -> None:
        """Called by the event loop: the stream has brought tokens."""
        self._since_advance = 0

    def pick(self, ids: Sequence[int], most: int, least: float, *, branches: bool) -> Picked:
        """Called by the model's thread: the best draft after these ids; only the pending token if there are no
        guesses."""
        while self._arrived:
            new = self._arrived.popleft()
            self._tree.add(ids, new.base, new.tokens, new.parents, new.neg_log_probs)
        self._tree.follow(ids)
        return self._tree.pick(most, least, branches=branches)
