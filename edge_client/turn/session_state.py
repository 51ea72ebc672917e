"""The state of a session at the verifier: opened, resumed, or waiting for a retry. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa.wire import ClientSession
from moa.wire.messages import ClientMessage


@dataclass
class SessionState:
    """One session on one connection at a time."""

    session: ClientSession
    connection: int = 0
    """The number of the connection that the session was last brought up on; 0 for none."""
    established: bool = False
    """Whether rounds may be sent: the session is open on this connection, or its opening is on the way before them."""
    again_at: float | None = None
    """When a refused request is to be sent again."""

    @property
    def ready(self) -> bool:
        """Whether a round may be sent."""
        return self.established and self.again_at is None and not self.session.busy

    def bring_up(self, connection: int) -> Sequence[ClientMessage]:
        """What to send first on a connection: an opening, the next turn of a session that is open here, or a resume."""
        session = self.session
        before, self.connection, self.again_at = self.connection, connection, None
        if not session.settled:
            self.established = True
            return list(session.unsettled) or [session.open()]
        if connection == before:
            self.established = True
            return list(session.unsettled)
        self.established = False
        return session.recover()

    def lost(self) -> None:
        """The connection is gone."""
        self.established, self.again_at = False, None

    def repeat(self, at: float) -> None:
        """Nothing is sent before `at`; then unanswered requests are sent again."""
        self.established, self.again_at = True, at

    def due(self, now: float) -> Sequence[ClientMessage]:
        """The requests to send again now."""
        if self.again_at is None or now < self.again_at:
            return ()
        self.again_at = None
        return list(self.session.unsettled)
