"""Sends activation records: newest rows first, and only as fast as the link transmits without
queueing.

Records share a TCP connection with verdicts, so a verdict waits for every record byte sent before
it. The window keeps that wait short: like LEDBAT, it grows while the delay of acknowledgements
stays near its minimum, and shrinks when it rises, because bytes then queue somewhere on the path.
No torch, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cloud_verifier.engine.job import RecordRows
from moa import records
from moa.token_bucket import TokenBucket
from moa.wire.messages import Activations, RecordContract, RecordDtype
from moa.wire.ranges import Ranges

_FRAME_BYTES = 8 * 1024
"""About the size of a frame: a verdict waits for at most one that is being sent."""
_HEADER_BYTES = 64
"""What a frame takes beside its rows, about."""


@dataclass(eq=False, slots=True)
class OutgoingRecords:
    """The activation records of one session: what its edge wants and has, and what has been made."""

    session: bytes
    log: Sequence[int]
    """The session's tokens."""
    dtype: RecordDtype = "off"
    budget: TokenBucket = field(default_factory=lambda: TokenBucket(0, 0, 0.0))
    """Bytes a second, as the edge wants them; a rate of 0 is no limit."""
    held: Ranges = field(default_factory=Ranges)
    """Rows that the edge has, or that are on their way to it."""
    ready: Ranges = field(default_factory=Ranges)
    """Rows that have been made."""
    rows: RecordRows | None = None
    """Where they are; None without a slot."""
    epoch: int = 0
    """Recomputed values may differ in the last bits: the epoch separates rows from before and
    after."""

    def limit(self, rate: int) -> None:
        """Send at most so many bytes a second from now on."""
        if rate != self.budget.rate:
            self.budget = TokenBucket(rate, max(rate / 4, 1024), 0.0)

    def lose(self) -> None:
        """The slot is gone, and the rows with it."""
        self.rows = None
        self.ready = Ranges()
        self.epoch += 1

    def newest_unsent(self, most: int) -> tuple[int, int] | None:
        """The newest run of at most `most` rows that are made and that the edge does not have."""
        for start, stop in reversed(self.ready):
            run = self.held.newest_missing(stop, most, floor=start)
            if run is not None:
                return run
        return None


@dataclass(slots=True)
class RecordWindow:
    """How many payload bytes may be in flight."""

    ceiling: int
    """The largest window, in bytes."""
    clock: Callable[[], float]
    target_delay: float = 0.025
    """Seconds that bytes may queue on the path: with less the window grows, with more it shrinks."""
    floor: int = 4 * 1024
    """The smallest window, in bytes."""
    size: float = 16 * 1024
    """The window now, in bytes."""
    sent: int = 0
    """Bytes that were sent so far."""
    acked: int = 0
    """Bytes that were acknowledged so far."""
    _flying: deque[tuple[int, float]] = field(default_factory=deque)
    """For each frame in flight: the bytes that were sent so far with it, and when it was sent."""
    _base_delay: float = float("inf")
    """The shortest delay of an acknowledgement: that of a path on which nothing queues."""

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return int(self.size) - (self.sent - self.acked)

    def send(self, payload: int) -> None:
        """Note bytes that are being sent."""
        self.sent += payload
        self._flying.append((self.sent, self.clock()))

    def ack(self, received: int) -> bool:
        """Learn that the device has received so many bytes in all, and adjust the window by how
        long they were under way; returns whether that is news. An impossible number is ignored."""
        if not self.acked < received <= self.sent:
            return False
        gained = received - self.acked
        self.acked = received
        sent_at = None
        while self._flying and self._flying[0][0] <= received:
            sent_at = self._flying.popleft()[1]
        if sent_at is not None:  # else no frame has arrived whole, and there is no delay to measure
            self._adjust(gained, self.clock() - sent_at)
        return True

    def _adjust(self, gained: int, delay: float) -> None:
        """Make the window larger or smaller, because `gained` more bytes have arrived, the last of
        them after this delay."""
        self._base_delay = min(self._base_delay, delay)
        # What is beyond the shortest delay was spent in a queue: 1 is as much as it may be.
        queueing = (delay - self._base_delay) / self.target_delay
        if queueing < 1:
            self.size += gained * (1 - queueing)
        else:
            self.size -= gained * min(0.5, queueing - 1)
        self.size = max(self.floor, min(self.size, self.ceiling))


class _Sendable(NamedTuple):
    """The newest rows of a session, as many as one frame carries."""

    session: OutgoingRecords
    start: int
    stop: int
    bytes: int
    behind: int
    """Tokens of the log behind these rows. The session with the fewest is served first: fresh rows
    are worth more."""


class RecordSender:
    """Picks the next activation frame of a connection.

    It looks only at sessions that were offered since they last had nothing to send, so that its
    cost does not grow with the number of sessions.
    """

    def __init__(
        self, contract: RecordContract | None, ceiling: int, clock: Callable[[], float]
    ) -> None:
        """Send records of the shape that `contract` says; None: there are none. At most `ceiling`
        bytes are in flight."""
        self.window = RecordWindow(ceiling, clock)
        self._contract = contract
        self._clock = clock
        self._offered: dict[bytes, OutgoingRecords] = {}
        """Sessions that may have something to send."""
        self._row_bytes: dict[RecordDtype, int] = {}
        """Bytes of a row by precision."""
        if contract is not None:
            heads = contract.heads
            dim = contract.head_dim
            self._row_bytes = {
                dtype: records.row_bytes(dtype, heads, dim) for dtype in records.DTYPES
            }
        self._smallest = min(self._row_bytes.values(), default=1)
        """Bytes of the smallest record: with less room nothing can be sent."""

    def offer(self, session: OutgoingRecords) -> None:
        """The session may have rows to send now."""
        if self._contract is not None:
            self._offered[session.session] = session

    def next(self) -> tuple[Activations | None, float | None]:
        """Returns the activation records to send now, and 0; or None, and the seconds until there
        may be some (None: until something changes)."""
        if self._contract is None or self.window.room < self._smallest:
            return None, None  # an acknowledgement will wake us
        freshest, shortest_wait = self._freshest()
        if freshest is None:
            return None, shortest_wait
        rows_in_window = self.window.room // self._row_bytes[freshest.session.dtype]
        if not rows_in_window:
            return None, None  # an acknowledgement will wake us
        start = max(freshest.start, freshest.stop - rows_in_window)
        return self._frame(freshest.session, start, freshest.stop), 0.0

    def _freshest(self) -> tuple[_Sendable | None, float | None]:
        """Returns the rows to send first, of all sessions whose own rate allows a frame now; and
        the seconds until it allows one of another session, None if no session waits for that."""
        freshest: _Sendable | None = None
        shortest_wait: float | None = None
        for session in list(self._offered.values()):
            found = self._sendable(session)
            if found is None:
                del self._offered[session.session]
                continue
            wait = session.budget.wait(found.bytes + _HEADER_BYTES, self._clock())
            if wait > 0:
                shortest_wait = wait if shortest_wait is None else min(shortest_wait, wait)
            elif freshest is None or found.behind < freshest.behind:
                freshest = found
        return freshest, shortest_wait

    def _sendable(self, session: OutgoingRecords) -> _Sendable | None:
        """Returns the newest records of a session that its device does not have, as many as one
        frame carries; None if there is nothing to send."""
        row_bytes = self._row_bytes.get(session.dtype)
        if row_bytes is None or session.rows is None:
            return None
        run = session.newest_unsent(max(1, _FRAME_BYTES // row_bytes))
        if run is None:
            return None
        start, stop = run
        return _Sendable(
            session=session,
            start=start,
            stop=stop,
            bytes=row_bytes * (stop - start),
            behind=len(session.log) - stop,
        )

    def forget(self, session: bytes) -> None:
        """The session is gone from this connection."""
        self._offered.pop(session, None)

    def _frame(self, session: OutgoingRecords, start: int, stop: int) -> Activations:
        """Returns the message with the records of these positions, which count as sent from now
        on."""
        if session.rows is None or session.dtype == "off" or self._contract is None:
            raise RuntimeError("a session without records was picked")
        payload = records.encode(*session.rows.read(start, stop), session.dtype)
        session.held.add(start, stop)
        self.window.send(len(payload))
        session.budget.spend(len(payload) + _HEADER_BYTES)
        return Activations(
            session=session.session,
            epoch=session.epoch,
            start=start,
            rows=stop - start,
            dtype=session.dtype,
            heads=self._contract.heads,
            head_dim=self._contract.head_dim,
            payload=payload,
        )
