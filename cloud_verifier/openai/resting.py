"""Sessions that stay behind their answers. A program sends a chat from its beginning with each
question: what an earlier session of the chat has run is shared with the next one, and not run again."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.sessions.session import ServerSession
from cloud_verifier.sessions.table import LEAST_SHARED_TOKENS, SessionTable
from moa.text_stream import common_prefix

_SLOTS_FOR_ONE = 8
"""A principal's resting sessions are at most one of so many slots. Whoever needs a slot takes one of
theirs first; but on a processor each takes memory as long as it is there."""


class RestingSessions:
    """Which sessions rest, the oldest first. Pure but for the table that they are in."""

    def __init__(self, table: SessionTable, slots: int) -> None:
        """Rest in this `table`, whose sessions have so many `slots`."""
        self._table = table
        self._most = max(1, slots // _SLOTS_FOR_ONE)
        self._resting: list[ServerSession] = []

    def leave_room(self, principal: str, ids: Sequence[int]) -> ServerSession | None:
        """Forget so many of the principal's resting sessions that one more may rest. Returns the
        session that has most of this prompt's beginning, which is kept; None if none has enough of
        it to be shared."""
        own = self._of(principal)
        prompt = list(ids)
        shared = [(common_prefix(session.log, prompt), session) for session in own]
        tokens, best = max(shared, key=lambda one: one[0], default=(0, None))
        if tokens < LEAST_SHARED_TOKENS:
            best = None
        others = [session for session in own if session is not best]
        excess = len(own) - (self._most - 1)
        # What is to be shared is kept for the moment, also where only one may rest.
        for session in others[: max(0, excess)]:
            self._forget(session)
        return best

    def rest(self, principal: str, id: bytes, instead: ServerSession | None) -> None:
        """Let the session of this id rest, if it is still there, `instead` of the one of which it
        has what its chat needs."""
        session = self._table.find(id, principal)
        if session is None:
            return
        if instead is not None:
            self._forget(instead)
        self._resting.append(session)
        # Of answers that ran at the same time each had left room for itself alone.
        own = self._of(principal)
        for oldest in own[: max(0, len(own) - self._most)]:
            self._forget(oldest)

    def _of(self, principal: str) -> list[ServerSession]:
        """Those of this principal that are still there, and have a KV cache to share."""
        gone = [session for session in self._resting if not self._is_of_use(session)]
        for session in gone:
            self._forget(session)
        return [session for session in self._resting if session.principal == principal]

    def _is_of_use(self, session: ServerSession) -> bool:
        return session.lease is not None and self._is_there(session)

    def _is_there(self, session: ServerSession) -> bool:
        return self._table.find(session.id, session.principal) is session

    def _forget(self, session: ServerSession) -> None:
        if session in self._resting:
            self._resting.remove(session)
        if self._is_there(session):
            self._table.remove(session, "closed")
