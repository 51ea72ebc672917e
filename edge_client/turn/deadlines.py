"""All deadlines of a turn. Times are in seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """The configured waiting times."""

    offline_after: float = 1.0
    """Wait beyond the usual, after which the device writes offline."""
    settle: float = 5.0
    """Wait for the check of offline text, once it is complete."""
    answer: float = 120.0
    """Wait for an answer on a live connection; then the round is sent on a new connection."""
    late_pace: float = 0.05
    """Time between offline tokens while an answer is only late: most of them would be withdrawn."""


@dataclass(slots=True)
class Deadlines:
    """The times from which the deadlines of one turn are computed.

    They count from what a person sees: the last verified token, and the moment from which nothing more could be
    written. Refusals, new sessions, new connections and silence do not restart them.
    """

    patience: Patience
    waiting_since: float
    """Since when the user has waited for a token: the start or the last verified token, or the first request after it,
    because drafting takes time too."""
    down_since: float | None = None
    """Since when there has been no connection; None while there is one."""
    asked_at: float = 0.0
    usual: float = 0.0
    """Seconds that the pending answer may take without being late."""
    blocked_since: float | None = None
    """Since when nothing more could be written: the text is complete, or long enough for the guard."""
    written_at: float = float("-inf")
    """When the device wrote its last provisional token."""
    _read_at: float = float("-inf")
    """When the user had read the latest events: answers that arrived before are not late."""
    _asked: bool = False
    """Whether there was a request, or a provisional token, since the last verified one."""

    def asked(self, now: float, usual: float) -> None:
        """A round was sent."""
        self.asked_at, self.usual = now, usual
        if not self._asked:
            self.waiting_since, self._asked = now, True

    def written(self, now: float) -> None:
        """The device wrote a provisional token."""
        self.written_at, self._asked = now, True

    def progressed(self, now: float, usual: float) -> None:
        """Verified tokens arrived; the next ones are expected within `usual`."""
        self.waiting_since, self.usual, self.blocked_since = max(now, self._read_at), usual, None
        self._asked = False

    def read(self, since: float, now: float) -> None:
        """The user read events since then: that is no waiting."""
        self.waiting_since += now - since
        if self.blocked_since is not None:
            self.blocked_since += now - since
        self._read_at = now

    def restart(self, now: float) -> None:
        """The user waits once more."""
        self.waiting_since, self.blocked_since = now, None

    def connected(self) -> None:
        """The connection is up."""
        self.down_since = None

    def lost(self, since: float) -> None:
        """The connection has been down since then."""
        self.down_since = since if self.down_since is None else self.down_since

    def write_at(self) -> float:
        """When the device may write its next offline token."""
        if self.down_since is not None:
            return min(self.waiting_since, self.down_since) + self.patience.offline_after
        late = self.waiting_since + self.usual + self.patience.offline_after
        return max(late, self.written_at + self.patience.late_pace)

    def give_up_at(self) -> float:
        """When a connection with a pending answer is given up."""
        return max(self.asked_at, self.waiting_since) + max(self.patience.answer, 4 * self.usual)

    def end_at(self, now: float, *, empty: bool) -> float:
        """When a turn that cannot write must end; `empty`: it has no text, and the answer is only slow."""
        if self.blocked_since is None:
            self.blocked_since = now
        patience = self.patience.answer if empty else self.patience.settle
        return max(self.blocked_since, self.waiting_since + self.usual) + patience
