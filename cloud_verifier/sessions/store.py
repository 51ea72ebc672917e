"""Sessions and slots. Runs in the event loop; no I/O and no torch.

    live        a connection is attached
    detached    no connection; the slot is kept for a while
    cold        no slot; the token log is kept, and the slot's content is recomputed from it when needed
    gone        nothing is kept

Three budgets: slots (`slots.py`), pages of KV cache (`page_reservations.py`) and bytes of token logs. They are shared
between principals: one above its share loses to one below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cloud_verifier.engine.page_reservations import PageReservations
from cloud_verifier.engine.work import Job, Lease, ModelFacts, RecordRows, Spent
from cloud_verifier.logs import log
from cloud_verifier.sessions.guesses import Guesses
from cloud_verifier.sessions.slots import SlotShares
from moa.sampling import SamplingSettings
from moa.tokens import common_prefix
from moa.wire.codes import Code, Refusal
from moa.wire.history import History
from moa.wire.limits import Limits
from moa.wire.messages import Message, RecordDtype, RowRange
from moa.wire.ranges import Ranges

State = Literal["live", "detached", "cold"]
_BYTES_PER_TOKEN = 40  # a Python int and its place in a list
_BYTES_PER_SESSION = 4096
_BYTES_PER_RUN = 80  # two Python ints and their places
_USUAL_RUNS = 8
"""So many ranges of held rows are in a session's own bytes: records come and go between two rounds, and no round may be
admitted within the budget and then found beyond it for that."""
_MAX_HELD_RUNS = 512
_MIN_SHARED_TOKENS = 16


class SessionOwner(Protocol):
    """The connection that a session is attached to."""

    def answer(self, message: Message, spent: Spent | None = None) -> None:
        """Queue an answer."""

    def offer(self, session: Session) -> None:
        """The session may have records to send."""

    def let_go(self, session: Session) -> None:
        """The session is closed, or attached to another connection."""


@dataclass(eq=False, slots=True)
class Session:
    """One session: its history, its claim on a slot, and what of its records the edge holds."""

    id: bytes
    principal: str
    history: History
    sampling: SamplingSettings
    records: RecordDtype
    record_rate: int
    held: Ranges
    """Record rows that the edge has, or that are on their way to it."""
    ready: Ranges
    """Record rows that have been made."""
    used: float
    streams: bool = False
    """The edge may ask for server-drafted rounds, whose drafter needs the records beside the target."""
    owner: SessionOwner | None = None
    """None while detached."""
    lease: Lease | None = None
    job: Job | None = None
    """Work that is queued or runs; none while a stream waits for what the edge foresees."""
    guesses: Guesses | None = None
    """Of the running stream."""
    counted: int = 0
    """Bytes that the store has counted for this session."""

    @property
    def state(self) -> State:
        """The session's state."""
        if self.owner is not None:
            return "live"
        return "detached" if self.lease is not None else "cold"

    @property
    def at_rest(self) -> bool:
        """Whether no work of it is queued or runs: between two rounds, or in a stream that waits for guesses."""
        return self.history.running is None or (self.job is None and self.guesses is not None)

    @property
    def log_bytes(self) -> int:
        """Approximate memory of the history."""
        log = _BYTES_PER_TOKEN * len(self.history.ids) + len(self.history.rows)
        return _BYTES_PER_SESSION + log + _BYTES_PER_RUN * max(0, self.held.runs - _USUAL_RUNS)

    def edge_holds(self, ranges: Iterable[RowRange]) -> None:
        """Store the rows that the edge says it has: only rows of the log, and a bounded number of ranges."""
        held = Ranges(ranges)
        held.truncate(len(self.history.ids))
        held.keep_newest(_MAX_HELD_RUNS)
        self.held = held


class SessionStore:
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
        self._limits, self._facts, self._clock = limits, facts, clock
        self._release, self._evicted = release, evicted
        # A session is its principal's: two principals may use the same id and never learn of each other.
        self._sessions: dict[tuple[str, bytes], Session] = {}
        self._owned: Counter[str] = Counter()
        pause = 2 * limits.busy_retry_seconds
        self._slots = SlotShares(facts.slots, limits.idle_seconds, claim_seconds=4 * pause, pause_seconds=pause)
        self._log_bytes = 0
        self._pages = PageReservations(facts.page_tokens, free_pages) if facts.pages else None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def slots_free(self) -> int:
        """Slots that no session holds."""
        return self._slots.free

    @property
    def log_bytes(self) -> int:
        """Approximate memory of all histories."""
        return self._log_bytes

    def count(self) -> dict[State, int]:
        """Sessions by state."""
        counts: dict[State, int] = {"live": 0, "detached": 0, "cold": 0}
        for session in self._sessions.values():
            counts[session.state] += 1
        return counts

    def get(self, id: bytes, principal: str) -> Session:
        """The session, if this principal has one of this id."""
        session = self.find(id, principal)
        if session is None:
            raise Refusal(Code.UNKNOWN_SESSION, "no such session here", session=id)
        session.used = self._clock()
        return session

    def find(self, id: bytes, principal: str) -> Session | None:
        """Like `get`, or None."""
        return self._sessions.get((principal, id))

    def check_room(self, id: bytes, principal: str, tokens: int = 0) -> None:
        """Refuse a new session where there is no room for one with a log of this many tokens."""
        own = self._owned[principal]
        if own >= self._limits.max_sessions_per_principal and not self._drop_oldest("sessions", principal):
            raise self._busy(id, principal, f"{own} sessions are open", "max_sessions_per_principal")
        if len(self._sessions) >= self._limits.max_sessions and not self._drop_oldest("sessions"):
            raise self._busy(id, principal, f"{len(self._sessions)} sessions are open", "max_sessions")
        self.check_logs(id, principal, _BYTES_PER_SESSION + _BYTES_PER_TOKEN * tokens)

    def check_logs(self, id: bytes, principal: str, growth: int) -> None:
        """Refuse growth of the token logs beyond their budget; unused sessions are dropped first."""
        limit = self._limits.max_log_bytes
        while self._log_bytes + growth > limit:
            if self._drop_oldest("log_bytes"):
                continue
            if not self._drop_greedy("log_bytes", principal):
                raise self._busy(id, principal, f"{self._log_bytes} bytes of token logs are held", "max_log_bytes")

    def check_growth(self, session: Session, tokens: int) -> None:
        """The same for a session that is about to grow."""
        self.check_logs(session.id, session.principal, _BYTES_PER_TOKEN * tokens)

    def add(self, session: Session) -> None:
        """Add a new session."""
        self._sessions[session.principal, session.id] = session
        self._owned[session.principal] += 1
        self.account(session)

    def account(self, session: Session) -> None:
        """Count the growth of the session's log."""
        if self._sessions.get((session.principal, session.id)) is session:
            self._log_bytes += session.log_bytes - session.counted
            session.counted = session.log_bytes

    def ensure_lease(self, session: Session) -> bool:
        """Ensure that the session has a slot; True if it is a new, empty one (which needs a prefill)."""
        if session.lease is not None:
            return False
        now = self._clock()
        if not self._slots.may_take(session.principal, now):
            victim = self._slots.victim(session, self._sessions.values(), now)
            if victim is None:
                raise self._busy(session.id, session.principal, f"all {self._facts.slots} slots are busy", "slots")
            self.evict(victim, "slot_needed")
        session.lease = Lease(session.id, session.principal)
        session.ready = Ranges()
        self.fit_records(session)
        self._slots.take(session.principal)
        self._share_prefix(session)
        return True

    def must_yield(self, session: Session) -> bool:
        """Whether another principal, which holds less than its share, waits for the slot of this session."""
        return session.lease is not None and self._slots.must_yield(session.principal, self._clock())

    def pass_on(self, session: Session) -> None:
        """Called between two of its rounds: give the slot to a principal that waits for its share, if there is one."""
        if self.must_yield(session):
            self.evict(session, "fair_share")

    def make_room(self, session: Session, tokens: int) -> None:
        """Reserve memory for so many tokens of the session; `busy` if others need it."""
        if self._pages is None or session.lease is None:
            return
        before = self._pages.reserve(session.lease, tokens)
        while self._pages.missing:
            victim = self._slots.victim(session, self._sessions.values(), self._clock())
            if victim is None:
                self._pages.undo(session.lease, before)
                raise self._busy(session.id, session.principal, "the key/value memory is in use", "kv_tokens")
            self.evict(victim, "pages_needed")

    def fit_records(self, session: Session) -> None:
        """Make records from now on, if the edge or the server's own drafter needs them."""
        contract, lease = self._facts.records, session.lease
        wanted = session.records != "off" or session.streams
        if contract is not None and lease is not None and lease.records is None and wanted:
            lease.records = RecordRows(contract.heads, contract.head_dim)
        if lease is not None:
            lease.eager_records = session.records != "off"

    def evict(self, session: Session, reason: str) -> None:
        """Take the session's slot away; its log stays."""
        if session.lease is None:
            return
        self._release(session.lease)
        if self._pages is not None:
            self._pages.release(session.lease)
        session.lease = None
        session.job = None
        session.ready = Ranges()
        # Recomputed values may differ in the last bits: the epoch separates rows from before and after.
        session.history.epoch += 1
        self._slots.give_back(session.principal)
        self._evicted(reason)

    def detach(self, session: Session) -> None:
        """The connection is gone; the session waits for a resume."""
        session.owner = None
        session.used = self._clock()

    def remove(self, session: Session, reason: str) -> None:
        """Forget the session, and detach it from its connection."""
        if session.owner is not None:
            session.owner.let_go(session)
        if session.lease is not None:
            self.evict(session, reason)
        if self._sessions.pop((session.principal, session.id), None) is not None:
            self._owned[session.principal] -= 1
            self._log_bytes -= session.counted
            session.counted = 0
            log.info(
                "session ended",
                extra={
                    "event": "ended",
                    "session": session.id,
                    "principal": session.principal,
                    "reason": reason,
                    "tokens": len(session.history.ids),
                },
            )

    def sweep(self) -> None:
        """Apply timeouts: detached sessions lose their slot, cold ones are removed."""
        now = self._clock()
        for session in list(self._sessions.values()):
            idle = now - session.used
            if session.state == "detached" and idle >= self._limits.detached_seconds and session.job is None:
                self.evict(session, "detached_too_long")
            elif session.state == "cold" and idle >= self._limits.cold_seconds:
                self.remove(session, "cold_too_long")

    # ---- choosing whom to evict

    def _drop_oldest(self, reason: str, principal: str | None = None) -> bool:
        """Forget the session without a connection that has been unused the longest, cold ones first."""
        fit = [
            s
            for s in self._sessions.values()
            if s.owner is None and s.history.running is None and principal in (None, s.principal)
        ]
        if not fit:
            return False
        self.remove(min(fit, key=lambda s: (s.lease is not None, s.used)), reason)
        return True

    def _drop_greedy(self, reason: str, principal: str) -> bool:
        """Forget the least recently used session of the principal with the largest logs, unless that is the asking
        one."""
        held: Counter[str] = Counter()
        for session in self._sessions.values():
            held[session.principal] += session.counted
        greediest, most = max(held.items(), key=lambda item: item[1], default=(principal, 0))
        if greediest == principal or most <= self._limits.max_log_bytes // len({principal, *held}):
            return False
        fit = [s for s in self._sessions.values() if s.principal == greediest and s.history.running is None]
        if not fit:
            return False
        self.remove(min(fit, key=lambda s: s.used), reason)
        return True

    def _share_prefix(self, session: Session) -> None:
        """Find a lease of the same principal with a common prefix, which then need not run again."""
        ids = session.history.ids
        best, found = _MIN_SHARED_TOKENS - 1, None
        for other in self._sessions.values():
            if other is session or other.principal != session.principal or other.lease is None:
                continue
            if (alike := common_prefix(ids, other.history.ids)) > best:
                best, found = alike, other.lease
        if session.lease is not None and found is not None:
            session.lease.share, session.lease.share_tokens = found, min(best, len(ids) - 1)

    def _busy(self, id: bytes, principal: str, message: str, limit: str) -> Refusal:
        retry = int(1000 * self._slots.appointment(principal, self._clock()))
        return Refusal(Code.BUSY, message, limit=limit, retry_after_ms=retry, session=id)
