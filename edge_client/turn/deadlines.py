"""All deadlines of a turn. Times are in seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """The configured waiting times."""

    offline_after: float = 1.0
    """Wait beyond the usual, after which the device writes offline."""
    settle: float = 5.0
    """Wait at the end for a verifier that is not reachable, to check offline text."""
    answer: float = 120.0
    """Wait for an answer on a live connection; then the round is sent on a new connection."""
    late_pace: float = 0.05
    """Time between offline tokens while an answer is only late: most of them would be withdrawn."""


@dataclass(slots=True)
class Deadlines:
    """The times from which the deadlines of one turn are computed."""

    patience: Patience
    waiting_since: float
    """Since when the user has waited for a token: the start, the last verified token, the last round asked in time."""
    down_since: float | None = None
    """Since when there has been no connection; None while there is one."""
    asked_at: float = 0.0
    usual: float = 0.0
    """Seconds that the pending answer may take without being late."""
    stuck_since: float | None = None
    """Since when the turn could neither write nor ask."""
    written_at: float = float("-inf")
    """When the device wrote its last provisional token."""

    def asked(self, now: float, usual: float, *, writing: bool) -> None:
        """A round was sent; `writing`: the user already reads provisional text, so the wait is not restarted."""
        self.asked_at, self.usual = now, usual
        if not writing:
            self.waiting_since = now

    def progressed(self, now: float, usual: float) -> None:
        """Verified tokens arrived; the next ones are expected within `usual`."""
        self.waiting_since, self.usual, self.stuck_since = now, usual, None

    def connected(self) -> None:
        """The connection is up."""
        self.down_since = self.stuck_since = None

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

    def end_at(self, now: float) -> float:
        """When a blocked turn must end."""
        if self.stuck_since is None:
            self.stuck_since = now
        return self.stuck_since + self.patience.settle
