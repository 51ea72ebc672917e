"""All sessions of a process, and the budgets that they share. Runs in the event loop; no I/O and no torch; the clock
is passed in.

    live        a connection is attached
    detached    no connection; the slot is kept for a while
    cold        no slot; the token log is kept, and the slot's content is recomputed from it when needed
    gone        nothing is kept

Three budgets: slots and pages of KV cache (`slots.py`), and bytes of token logs. They are shared
between principals: one above its share loses to one below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.engine.job import Lease, RecordRows
from cloud_verifier.logs import log
from cloud_verifier.sessions.outbox import Outbox
from cloud_verifier.sessions.session import ServerSession, State
from cloud_verifier.sessions.slots import PageReservations, SlotShares
from moa.api.access import ANONYMOUS
from moa.text_stream import common_prefix
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits

_NOT_TAKEN_AWAY = frozenset({"closed", "revoked", "refused", "logs_differ", "quarantined"})
"""Reasons for which a slot comes back that nobody else wanted: no evictions."""
LEAST_SHARED_TOKENS = 16
"""A common prefix that is shorter is not worth looking up and copying."""


class SessionTable:
    """All sessions of this process."""

    def __init__(
        self,
        limits: Limits,
        facts: ModelFacts,
        *,
        clock: Callable[[], float],
        release: Callable[[Lease], Any],
        evicted: Callable[[str], None] = lambda reason: None,
        free_pages: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin without sessions. `release` gives a slot back to the engine, `evicted` is told the
        reason, and `free_pages` returns how many pages of KV cache nobody holds."""
        self._limits = limits
        self._facts = facts
        self._clock = clock
        self._release = release
        self._evicted = evicted
        self._sessions: dict[tuple[str, bytes], ServerSession] = {}
        """By principal and id: two principals may use the same id and never learn of each other."""
        self._owned: Counter[str] = Counter()
        """The number of sessions of each principal."""
        pause = 2 * limits.busy_retry_seconds  # until a refused session asks again
        self._slots = SlotShares(
            facts.slots, limits.idle_seconds, claim_seconds=4 * pause, pause_seconds=pause
        )
        self.log_bytes = 0
        """Approximate memory of all histories."""
        # Where all slots can be full at once, no pages need be reserved.
        self._pages = PageReservations(facts.page_tokens, free_pages) if facts.pages else None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(self._sessions.values())

    @property
    def slots_free(self) -> int:
        """Slots that no session holds."""
        return self._slots.free

    def count(self) -> dict[State, int]:
        """Sessions by state."""
        counts: dict[State, int] = {"live": 0, "detached": 0, "cold": 0}
        for session in self._sessions.values():
            counts[session.state] += 1
        return counts

    def find(self, id: bytes, principal: str) -> ServerSession | None:
        """The session, if this principal has one of this id."""
        return self._sessions.get((principal, id))

    def attached(self, id: bytes, principal: str, outbox: Outbox) -> ServerSession:
        """Returns this principal's session of this id. A `Refusal` if there is none, or if it
        belongs to another connection than this."""
        session = self._sessions.get((principal, id))
        if session is None:
            raise Refusal(Code.UNKNOWN_SESSION, "no such session here")
        session.used = self._clock()
        if session.outbox is not outbox:
            raise Refusal(Code.CONFLICT, "resume this session on this connection first")
        return session

    def check_room(self, session: ServerSession) -> None:
        """Refuse a new session if the process or its principal has too many, or too long ones.
        First sessions that nobody uses are forgotten."""
        own = self._owned[session.principal]
        if own >= self._limits.max_sessions_per_principal:
            dropped = self._drop_oldest("sessions", session.principal)
            if not dropped:
                whose = "" if session.principal == ANONYMOUS else " of your key"
                raise self._busy(session, _open_words(own, whose), "max_sessions_per_principal")
        total = len(self._sessions)
        if total >= self._limits.max_sessions:
            dropped = self._drop_oldest("sessions")
            if not dropped:
                raise self._busy(session, _open_words(total), "max_sessions")
        self.check_logs(session, session.log_bytes)

    def check_logs(self, session: ServerSession, growth: int) -> None:
        """Refuse to let the token logs of all sessions grow by `growth` bytes beyond their budget.
        First sessions that nobody uses are forgotten, then one of a principal with more than its
        share."""
        limit = self._limits.max_log_bytes
        while growth and self.log_bytes + growth > limit:
            dropped = self._drop_oldest("log_bytes")
            if not dropped:
                dropped = self._drop_greedy("log_bytes", session.principal)
            if not dropped:
                raise self._busy(
                    session, f"{self.log_bytes} bytes of token logs are held", "max_log_bytes"
                )

    def add(self, session: ServerSession) -> None:
        """Add a new session."""
        self._sessions[session.principal, session.id] = session
        self._owned[session.principal] += 1
        self.account(session)

    def account(self, session: ServerSession) -> None:
        """Count what the session's log has grown by since it was last counted; nothing of a session
        that is not in the table."""
        if self._sessions.get((session.principal, session.id)) is session:
            self.log_bytes += session.log_bytes - session.counted
            session.counted = session.log_bytes

    def reserve(self, session: ServerSession) -> Lease:
        """Returns the session's lease, its claim on a slot, after reserving what its next forward
        needs: bytes of log, a slot, and pages of KV cache. Raises a `Refusal` if others need
        them."""
        self.check_logs(session, session.next_bytes)
        had_slot = session.lease is not None
        lease = self._ensure_lease(session)
        try:
            self.reserve_pages(session)
        except Refusal:
            if not had_slot:  # one without pages is of no use to it
                self.evict(session, "refused")
            raise
        return lease

    def reserve_pages(self, session: ServerSession) -> None:
        """Reserve KV cache for the session's next forward, if need be by taking slots from other
        sessions. Raises a `Refusal` if there is no session to take one from."""
        if self._pages is None or session.lease is None:
            return
        before = self._pages.reserve(session.lease, session.base + session.next_tokens)
        while self._pages.missing:
            victim = self._slots.victim(session, self._sessions.values(), self._clock())
            if victim is None:
                self._pages.undo(session.lease, before)
                raise self._busy(session, "the key/value memory is in use", "kv_tokens")
            self.evict(victim, "pages_needed")

    def _ensure_lease(self, session: ServerSession) -> Lease:
        """Returns the session's lease, its claim on a slot of KV cache. A new one may take its slot
        from another session; a `Refusal` if none is to be had."""
        if session.lease is not None:
            return session.lease
        now = self._clock()
        if not self._slots.may_take(session.principal, now):
            victim = self._slots.victim(session, self._sessions.values(), now)
            if victim is None:
                message = f"all {self._facts.slots} slots are busy"
                raise self._busy(session, message, self._facts.slots_limit)
            self.evict(victim, "slot_needed")
        self._slots.take(session.principal)
        session.lease = lease = Lease(session.id, session.principal)
        self.fit_records(session)
        self._share_prefix(session)
        return lease

    def must_yield(self, session: ServerSession) -> bool:
        """Whether another principal, which holds less than its share, waits for the slot of this
        session."""
        return session.lease is not None and self._slots.must_yield(
            session.principal, self._clock()
        )

    def pass_on(self, session: ServerSession) -> None:
        """Give the session's slot to a principal that waits for its share, if there is one; called
        between two rounds of the session."""
        if self.must_yield(session):
            self.evict(session, "fair_share")

    def fit_records(self, session: ServerSession) -> None:
        """Give the session a place for activation records if its device wants any, or the server's
        own drafter needs them."""
        contract = self._facts.records
        lease = session.lease
        if lease is None:
            return
        lease.eager_records = session.records.dtype != "off"
        wanted = lease.eager_records or self._facts.stream_records
        if contract is not None and lease.records is None and wanted:
            lease.records = RecordRows(contract.heads, contract.head_dim)
        session.records.rows = lease.records

    def evict(self, session: ServerSession, reason: str) -> None:
        """Take the session's slot away, and with it the KV cache and the records; its token log
        stays."""
        if session.lease is None:
            return
        self._release(session.lease)
        if self._pages is not None:
            self._pages.release(session.lease)
        session.lease = None
        session.job = None
        session.records.lose()
        self._slots.give_back(session.principal)
        if reason not in _NOT_TAKEN_AWAY:
            self._evicted(reason)

    def remove(self, session: ServerSession, reason: str) -> None:
        """Forget the session, and let nothing more be sent for it."""
        session.detach()
        self.evict(session, reason)
        if self._sessions.pop((session.principal, session.id), None) is not None:
            self._owned[session.principal] -= 1
            self.log_bytes -= session.counted
            session.counted = 0
            fields = {
                "event": "ended",
                "session": session.id,
                "principal": session.principal,
                "reason": reason,
            }
            log.info("session ended", extra=fields | {"tokens": len(session.log)})

    def sweep(self) -> None:
        """Apply the timeouts: sessions without a connection lose their slot after a while, and are
        forgotten after a longer one."""
        now = self._clock()
        for session in list(self._sessions.values()):
            idle = now - session.used
            if session.state == "detached":
                if idle >= self._limits.detached_seconds and session.job is None:
                    self.evict(session, "detached_too_long")
            elif session.state == "cold" and idle >= self._limits.cold_seconds:
                self.remove(session, "cold_too_long")

    # ---- choosing whom to evict

    def _drop_oldest(self, reason: str, principal: str | None = None) -> bool:
        """Forget the session that has been unused the longest, of those without a connection, and
        of this principal if one is named; those without a slot first. Returns whether there was
        one."""
        candidates = [session for session in self._resting(principal) if session.outbox is None]
        candidates.sort(key=lambda session: (session.lease is not None, session.used))
        return self._drop_first(candidates, reason)

    def _drop_greedy(self, reason: str, principal: str) -> bool:
        """Forget the session that has been unused the longest of the principal with the largest
        logs, unless that one asks itself, or has no more than its share. Returns whether there was
        one."""
        log_bytes: Counter[str] = Counter()
        for session in self._sessions.values():
            log_bytes[session.principal] += session.counted
        greediest, most = max(log_bytes.items(), key=lambda item: item[1], default=(principal, 0))
        fair_share = self._limits.max_log_bytes // len({principal, *log_bytes})
        if greediest == principal or most <= fair_share:
            return False
        candidates = sorted(self._resting(greediest), key=lambda session: session.used)
        return self._drop_first(candidates, reason)

    def _resting(self, principal: str | None) -> Iterator[ServerSession]:
        """Sessions without a running round, of all principals or of this one."""
        for session in self:
            if session.running is None and principal in (None, session.principal):
                yield session

    def _drop_first(self, candidates: Sequence[ServerSession], reason: str) -> bool:
        """Forget the first of these sessions; returns whether there was one."""
        if not candidates:
            return False
        self.remove(candidates[0], reason)
        return True

    def run_before(self, session: ServerSession) -> int:
        """How many of a new session's first tokens another one of its principal has run: these are
        shared, and not run again."""
        source, common = self._source(session)
        return 0 if source is None else min(common, source.length)

    def _share_prefix(self, session: ServerSession) -> None:
        """Have the session share what another one has run: that is copied, and need not run
        again."""
        source, common = self._source(session)
        if session.lease is not None and source is not None:
            session.lease.share = source
            session.lease.share_tokens = common

    def _source(self, session: ServerSession) -> tuple[Lease | None, int]:
        """Find the lease of the same principal whose text begins with most of this session's
        tokens; returns it, and how many these are. None where there are too few."""
        ids = session.log
        longest = LEAST_SHARED_TOKENS - 1  # fewer tokens are not worth a copy
        found = None
        for other in self._sessions.values():
            if other is session or other.principal != session.principal or other.lease is None:
                continue
            if other.log[: longest + 1] != ids[: longest + 1]:
                continue  # most texts differ in their first tokens, and there may be a thousand
            common = common_prefix(ids, other.log)
            if common > longest:
                longest = common
                found = other.lease
        # The pending token is run in any case: its logits say what follows.
        return found, min(longest, len(ids) - 1)

    def _busy(self, session: ServerSession, message: str, limit: str) -> Refusal:
        """The refusal of a session for now, with the time at which it may ask again."""
        retry = int(1000 * self._slots.appointment(session.principal, self._clock()))
        return Refusal(Code.BUSY, message, limit=limit, retry_after_ms=retry)


def _open_words(count: int, whose: str = "") -> str:
    """That so many sessions are open, in words."""
    return f"1 session{whose} is open" if count == 1 else f"{count} sessions{whose} are open"
