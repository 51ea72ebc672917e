"""How long a turn waits for what: every deadline of a turn is computed here. Times are in seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """What the user is ready to wait for."""

    offline_after: float = 1.0
    """Beyond what the link was used to; then the device writes by itself, whatever holds the verifier up."""
    settle: float = 5.0
    """At the end, for a verifier that cannot be asked now to check what was written offline."""
    answer: float = 120.0
    """For an answer on a live connection; then the connection is given up, and the round is sent on a new one."""
    late_pace: float = 0.05
    """Between tokens written while an answer is merely late: most of them would have to be withdrawn."""


@dataclass(slots=True)
class Clockwork:
    """The moments that the deadlines of one turn count from."""

    patience: Patience
    waiting_since: float
    """Since when the user has waited for a token: the start, the last verified token, the last round asked in time."""
    down_since: float | None = None
    """Since when there has been no connection; None while there is one."""
    asked_at: float = 0.0
    usual: float = 0.0
    """Seconds that the answer under way may take on this link without being late."""
    stuck_since: float | None = None
    """Since when nothing could be written, and nobody be asked."""
    written_at: float = float("-inf")
    """When the device wrote its last provisional token."""

    def asked(self, now: float, usual: float, *, writing: bool) -> None:
        """A round was sent; `writing`: the user reads provisional text already, and his patience is not renewed."""
        self.asked_at, self.usual = now, usual
        if not writing:
            self.waiting_since = now

    def progressed(self, now: float, usual: float) -> None:
        """Verified tokens arrived; the next are expected within `usual`."""
        self.waiting_since, self.usual, self.stuck_since = now, usual, None

    def connected(self) -> None:
        """There is a connection."""
        self.down_since = self.stuck_since = None

    def lost(self, since: float) -> None:
        """There has been no connection since then."""
        self.down_since = since if self.down_since is None else self.down_since

    def write_at(self) -> float:
        """When the device may write its next token by itself."""
        if self.down_since is not None:
            return min(self.waiting_since, self.down_since) + self.patience.offline_after
        late = self.waiting_since + self.usual + self.patience.offline_after
        return max(late, self.written_at + self.patience.late_pace)

    def give_up_at(self) -> float:
        """When a connection that owes an answer is no use any more."""
        return max(self.asked_at, self.waiting_since) + max(self.patience.answer, 4 * self.usual)

    def end_at(self, now: float) -> float:
        """When a turn that is stuck must end as it is."""
        if self.stuck_since is None:
            self.stuck_since = now
        return self.stuck_since + self.patience.settle
