"""Sends activation records: newest rows first, and only as fast as the link transmits without queueing.

Records share a TCP connection with verdicts, so a verdict waits for every record byte sent before it. The window keeps
that wait short: like LEDBAT, it grows while the delay of acknowledgements stays near its minimum, and shrinks when it
rises, because bytes then queue somewhere on the path. No torch, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cloud_verifier.sessions.store import Session
from moa import records
from moa.token_bucket import TokenBucket
from moa.wire.messages import Activations, RecordContract

_FRAME_BYTES = 8 * 1024
_HEADER_BYTES = 64


@dataclass(slots=True)
class RecordWindow:
    """How many payload bytes may be in flight."""

    ceiling: int
    clock: Callable[[], float]
    target_delay: float = 0.025
    floor: int = 4 * 1024
    size: float = 16 * 1024
    sent: int = 0
    acked: int = 0
    _flying: deque[tuple[int, float]] = field(default_factory=deque)
    _base_delay: float = float("inf")

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return int(self.size) - (self.sent - self.acked)

    def send(self, payload: int) -> None:
        """Note bytes that are being sent."""
        self.sent += payload
        self._flying.append((self.sent, self.clock()))

    def ack(self, received: int) -> bool:
        """The edge has `received` bytes in total; returns whether that is new. An impossible number is ignored."""
        if not self.acked < received <= self.sent:
            return False
        gained, self.acked = received - self.acked, received
        sent_at = None
        while self._flying and self._flying[0][0] <= received:
            sent_at = self._flying.popleft()[1]
        if sent_at is None:
            return True
        delay = self.clock() - sent_at
        self._base_delay = min(self._base_delay, delay)
        waiting = delay - self._base_delay
        if waiting < self.target_delay:
            self.size += gained * (1 - waiting / self.target_delay)
        else:
            self.size -= gained * min(0.5, waiting / self.target_delay - 1)
        self.size = max(self.floor, min(self.size, self.ceiling))
        return True


class RecordSender:
    """Picks the next activation frame of a connection.

    It looks only at sessions that were offered since they last had nothing to send, so that its cost does not grow with
    the number of sessions.
    """

    def __init__(self, contract: RecordContract | None, ceiling: int, clock: Callable[[], float]) -> None:
        self.window = RecordWindow(ceiling, clock)
        self._contract = contract
        self._clock = clock
        self._offered: dict[bytes, Session] = {}
        self._budgets: dict[bytes, TokenBucket] = {}
        self._smallest = 0
        if contract is not None:
            names = [dtype for dtype in records.DTYPES if dtype in contract.dtypes]
            self._smallest = min((records.row_bytes(n, contract.heads, contract.head_dim) for n in names), default=1)

    def offer(self, session: Session) -> None:
        """The session may have rows to send now."""
        if self._contract is not None:
            self._offered[session.id] = session

    def next(self) -> tuple[Activations | None, float | None]:
        """A frame to send now, or how long to wait for one (None: until something changes)."""
        if self._contract is None or self.window.room < self._smallest:
            return None, None  # an acknowledgement will wake us
        pause: float | None = None
        best: tuple[int, Session, records.PayloadDtype, int, int] | None = None
        for session in list(self._offered.values()):
            if (wanted := self._wanted(session)) is None:
                del self._offered[session.id]
                continue
            dtype, start, stop = wanted
            size = records.row_bytes(dtype, self._contract.heads, self._contract.head_dim)
            wait = self._budget(session).wait(size * (stop - start) + _HEADER_BYTES, self._clock())
            if wait > 0:
                pause = wait if pause is None else min(pause, wait)
                continue
            # The session whose newest rows are furthest behind its log is served last: fresh rows are worth more.
            behind = len(session.history.ids) - stop
            if best is None or behind < best[0]:
                best = (behind, session, dtype, start, stop)
        if best is None:
            return None, pause
        _, session, dtype, start, stop = best
        size = records.row_bytes(dtype, self._contract.heads, self._contract.head_dim)
        if self.window.room < size:
            return None, None
        start = max(start, stop - self.window.room // size)
        return self._frame(session, dtype, start, stop), 0.0

    def forget(self, session: bytes) -> None:
        """The session is gone from this connection."""
        self._budgets.pop(session, None)
        self._offered.pop(session, None)

    def _wanted(self, session: Session) -> tuple[records.PayloadDtype, int, int] | None:
        """The newest wanted rows, as many as fit one frame."""
        dtype, lease, contract = session.records, session.lease, self._contract
        if contract is None or dtype == "off" or lease is None or lease.records is None:
            return None
        rows = max(1, _FRAME_BYTES // records.row_bytes(dtype, contract.heads, contract.head_dim))
        run = newest_unsent(session, rows)
        return None if run is None else (dtype, *run)

    def _frame(self, session: Session, dtype: records.PayloadDtype, start: int, stop: int) -> Activations:
        lease, contract = session.lease, self._contract
        if lease is None or lease.records is None or contract is None:
            raise RuntimeError("a session without records was picked")
        keys, values = lease.records.read(start, stop)
        payload = records.encode(keys, values, dtype)
        session.held.add(start, stop)
        self.window.send(len(payload))
        self._budget(session).spend(len(payload) + _HEADER_BYTES)
        return Activations(
            session=session.id,
            epoch=session.history.epoch,
            start=start,
            rows=stop - start,
            dtype=dtype,
            heads=contract.heads,
            head_dim=contract.head_dim,
            payload=payload,
        )

    def _budget(self, session: Session) -> TokenBucket:
        budget = self._budgets.get(session.id)
        if budget is None or budget.rate != session.record_rate:
            rate = session.record_rate
            budget = self._budgets[session.id] = TokenBucket(rate, max(rate / 4, 1024), self._clock())
        return budget


def newest_unsent(session: Session, most: int) -> tuple[int, int] | None:
    """The newest run of at most `most` rows that are made and that the edge does not have."""
    for start, stop in reversed(session.ready):
        if (run := session.held.newest_missing(stop, most, floor=start)) is not None:
            return run
    return None
