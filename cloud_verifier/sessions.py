"""Sessions and who holds a slot. Runs in the event loop; no I/O and no torch.

    live        a connection is attached
    detached    no connection; the slot is kept for a while
    cold        no slot; the token log is kept, and the slot's content is recomputed from it when needed
    gone        nothing is kept

Two budgets: slots, and bytes of token logs. When slots run out, the one unused the longest is taken: from detached
sessions first, then from live ones that have nothing running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cloud_verifier.work import Job, Lease, ModelFacts, RecordRows
from moa.sampling import SamplingSettings
from moa.wire.codes import Code, Refusal
from moa.wire.history import History
from moa.wire.limits import Limits
from moa.wire.messages import RecordDtype
from moa.wire.ranges import Ranges

State = Literal["live", "detached", "cold"]
_BYTES_PER_TOKEN = 40  # a Python int and its place in a list
_BYTES_PER_SESSION = 4096
_MIN_SHARED_TOKENS = 16


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
    owner: Any = None
    """The connection's channel; None while detached."""
    lease: Lease | None = None
    job: Job | None = None

    @property
    def state(self) -> State:
        """Where the session stands."""
        if self.owner is not None:
            return "live"
        return "detached" if self.lease is not None else "cold"

    @property
    def log_bytes(self) -> int:
        """About what the history costs."""
        return _BYTES_PER_SESSION + _BYTES_PER_TOKEN * len(self.history.ids)


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
    ) -> None:
        self._limits, self._facts, self._clock = limits, facts, clock
        self._release, self._evicted = release, evicted
        self._sessions: dict[bytes, Session] = {}
        self._slots_used = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def slots_free(self) -> int:
        """Slots that no session claims."""
        return self._facts.slots - self._slots_used

    def count(self) -> dict[State, int]:
        """Sessions by state."""
        counts: dict[State, int] = {"live": 0, "detached": 0, "cold": 0}
        for session in self._sessions.values():
            counts[session.state] += 1
        return counts

    def get(self, id: bytes, principal: str) -> Session:
        """The session, if it is this principal's; a stranger learns nothing, not even that it exists."""
        session = self._sessions.get(id)
        if session is None or session.principal != principal:
            raise Refusal(Code.UNKNOWN_SESSION, "no such session here", session=id)
        session.used = self._clock()
        return session

    def peek(self, id: bytes) -> Session | None:
        """The session of this id, for the service's own use."""
        return self._sessions.get(id)

    def find(self, id: bytes, principal: str) -> Session | None:
        """Like `get`, or None. An id that another principal has taken is refused."""
        session = self._sessions.get(id)
        if session is not None and session.principal != principal:
            raise Refusal(Code.CONFLICT, "this session id is taken", session=id)
        return session

    def check_room(self, id: bytes, principal: str) -> None:
        """Refuse a new session where there is no room for one."""
        own = sum(s.principal == principal for s in self._sessions.values())
        if own >= self._limits.max_sessions_per_principal and not self._drop_oldest("sessions", principal):
            raise self._busy(id, f"{own} sessions are open", "max_sessions_per_principal")
        if len(self._sessions) >= self._limits.max_sessions and not self._drop_oldest("sessions"):
            raise self._busy(id, f"{len(self._sessions)} sessions are open", "max_sessions")

    def add(self, session: Session) -> None:
        """Take in a new session; older ones are dropped when the logs outgrow their budget."""
        self._sessions[session.id] = session
        self.shrink_logs()

    def shrink_logs(self) -> None:
        """Keep the token logs within their budget."""
        total = sum(s.log_bytes for s in self._sessions.values())
        while total > self._limits.max_log_bytes:
            before = total
            if not self._drop_oldest("log_bytes"):
                return
            total = sum(s.log_bytes for s in self._sessions.values())
            if total >= before:
                return

    def ensure_lease(self, session: Session) -> bool:
        """See that the session has a slot; True when it is a new, empty one (so there must be a prefill)."""
        if session.lease is not None:
            return False
        if not self.slots_free and not self._take_slot(session):
            raise self._busy(session.id, f"all {self._facts.slots} slots are busy", "slots")
        session.lease = Lease(session.id, session.principal)
        session.ready = Ranges()
        self.fit_records(session)
        self._slots_used += 1
        self._share_prefix(session)
        return True

    def fit_records(self, session: Session) -> None:
        """Have records made from now on, when the edge or the server's own drafter wants them."""
        contract, lease = self._facts.records, session.lease
        wanted = session.records != "off" or session.streams
        if contract is not None and lease is not None and lease.records is None and wanted:
            lease.records = RecordRows(contract.heads, contract.head_dim)

    def chill(self, session: Session, reason: str) -> None:
        """Take the session's slot away; its log stays."""
        if session.lease is None:
            return
        self._release(session.lease)
        session.lease = None
        session.job = None
        session.ready = Ranges()
        # What is recomputed may differ in the last bits: rows of before and after are told apart by the epoch.
        session.history.epoch += 1
        self._slots_used -= 1
        self._evicted(reason)

    def detach(self, session: Session) -> None:
        """The connection is gone; the session waits for its return."""
        session.owner = None
        session.used = self._clock()

    def remove(self, session: Session, reason: str) -> None:
        """Forget the session."""
        if session.lease is not None:
            self.chill(session, reason)
        self._sessions.pop(session.id, None)

    def sweep(self) -> None:
        """Let time take its course: detached sessions cool down, cold ones go."""
        now = self._clock()
        for session in list(self._sessions.values()):
            idle = now - session.used
            if session.state == "detached" and idle >= self._limits.detached_seconds and session.job is None:
                self.chill(session, "detached_too_long")
            elif session.state == "cold" and idle >= self._limits.cold_seconds:
                self.remove(session, "cold_too_long")

    # ---- choosing whom to evict

    def _take_slot(self, wanting: Session) -> bool:
        idle = [
            s for s in self._sessions.values() if s.lease is not None and s.history.running is None and s is not wanting
        ]
        # A live session that has paused is evicted too, for its next round costs no more than a prefill; but one that
        # is between two rounds must not lose its slot to a newcomer who would lose it right back.
        now = self._clock()
        fit = [s for s in idle if s.owner is None or now - s.used >= self._limits.idle_seconds]
        if not fit:
            return False
        self.chill(min(fit, key=lambda s: (s.owner is not None, s.used)), "slot_needed")
        return True

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

    def _share_prefix(self, session: Session) -> None:
        """Find a lease of the same principal whose log begins alike, so that the beginning need not run again."""
        ids = session.history.ids
        best, found = _MIN_SHARED_TOKENS - 1, None
        for other in self._sessions.values():
            if other is session or other.principal != session.principal or other.lease is None:
                continue
            if (alike := _common_prefix(ids, other.history.ids)) > best:
                best, found = alike, other.lease
        if session.lease is not None and found is not None:
            session.lease.share, session.lease.share_tokens = found, min(best, len(ids) - 1)

    def _busy(self, id: bytes, message: str, limit: str) -> Refusal:
        retry = int(1000 * self._limits.busy_retry_seconds * 2)
        return Refusal(Code.BUSY, message, limit=limit, retry_after_ms=retry, session=id)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common beginning, by bisection over slice comparisons, which run at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
