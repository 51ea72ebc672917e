"""The session of a turn, on one connection at a time: opened, resumed, or waiting for a retry.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.turn.deadlines import Moment
from moa.wire import ClientSession
from moa.wire.messages import ClientMessage


@dataclass
class SessionState:
    """Which messages of the session may be sent, and which must be sent first."""

    session: ClientSession
    connection: int = 0
    """The number of the connection that the session was last brought up on; 0 for none."""
    established: bool = False
    """Whether rounds may be sent: the session is open on this connection, or its opening is on the
    way before them."""
    again_at: float | None = None
    """When a refused request is to be sent again."""

    @property
    def usable(self) -> bool:
        """Whether messages about a round may be sent."""
        return self.established and self.again_at is None

    def bring_up(self, connection: int) -> Sequence[ClientMessage]:
        """Returns what to send first on this connection: the session's opening, or, where the
        verifier may have the session from another connection, a `Resume`. On the connection that
        the session is open on it is the requests without an answer."""
        session = self.session
        is_known_here = connection == self.connection
        is_new = not session.settled  # no verifier has it yet
        self.connection = connection
        self.again_at = None
        self.established = is_new or is_known_here
        if not self.established:
            return session.recover()
        if is_new and not session.unsettled:
            return [session.open()]
        # The opening or the next turn's prompt is among them.
        return list(session.unsettled)

    def lost(self) -> None:
        """Note that the connection is gone."""
        self.established = False
        self.again_at = None

    def repeat(self, at: float) -> None:
        """Send nothing before `at`; then unanswered requests are sent again."""
        self.established = True
        self.again_at = at

    def repeat_now(self) -> None:
        """Send a refused request again at once, if one waits for that."""
        if self.again_at is not None:
            self.again_at = float("-inf")

    def due(self, moment: Moment) -> Sequence[ClientMessage]:
        """The requests to send again now; none before their time."""
        if self.again_at is None or not moment.reached(self.again_at):
            return ()
        self.again_at = None
        return list(self.session.unsettled)
