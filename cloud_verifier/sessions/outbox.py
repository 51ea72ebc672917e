"""The send queue of one connection: answers first; activation records only when no answer waits and
the window allows.

Runs in the event loop; no sockets, no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from cloud_verifier.engine.contract import Latency
from cloud_verifier.metrics import Metrics
from cloud_verifier.sessions.budgets import BYTES, Meter
from cloud_verifier.sessions.record_sender import OutgoingRecords, RecordSender
from moa.wire.codec import encode
from moa.wire.codes import CloseCode
from moa.wire.limits import Limits
from moa.wire.messages import Activations, Message, RecordContract


class CloseConnection(Exception):
    """Close the connection with this code and reason, after sending what is queued."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Outbox:
    """The outgoing frames of one connection, and the sessions that are attached to it."""

    def __init__(
        self,
        metrics: Metrics,
        limits: Limits,
        clock: Callable[[], float],
        meter: Meter,
        *,
        is_local: bool = False,
    ) -> None:
        """Begin empty; what is sent is counted by `meter`."""
        self.is_local = is_local
        """Whether the other end is an answer of this process itself, for its API. Such an answer
        waits where it is refused for now, so that these refusals are not counted. And it cannot go
        on at another server: while the process drains, its streams are served to their end, and the
        drain waits for it."""
        self._wake = asyncio.Event()
        """Set when there may be something to send."""
        self.sessions: set[bytes] = set()
        """Ids of the attached sessions."""
        self._meter = meter
        self._metrics = metrics
        self._ceiling = limits.record_window_bytes
        """Bytes of activation records that may be in flight at most."""
        self._clock = clock
        self._most_bytes = limits.max_waiting_bytes
        """Bytes of answers that may wait: with more the connection is closed."""
        self._room_bytes = limits.send_buffer_bytes
        """Bytes of answers that may wait while requests are still read."""
        self._answer_bytes = metrics.sent_bytes.labels("answers")
        self.record_sender = RecordSender(None, self._ceiling, clock)
        self._answers: deque[tuple[bytes, Latency | None]] = deque()
        """Frames of answers that wait to be sent."""
        self._waiting_bytes = 0
        """Bytes of these frames."""
        self._room = asyncio.Event()
        """Set while few enough answers wait."""
        self._room.set()
        self._end: CloseConnection | None = None
        """How the connection is to be closed once everything is sent; None while it goes on."""

    def carry(self, contract: RecordContract | None) -> None:
        """Send records from now on, if the feature was agreed."""
        self.record_sender = RecordSender(contract, self._ceiling, self._clock)

    def attach(self, session: OutgoingRecords) -> None:
        """Let a session send here from now on."""
        self.sessions.add(session.session)
        self.offer(session)

    def detach(self, session: OutgoingRecords) -> None:
        """Let a session send here no more: it is closed, or another connection has taken it over."""
        self.sessions.discard(session.session)
        self.record_sender.forget(session.session)

    def offer(self, session: OutgoingRecords) -> None:
        """Look at a session's records: there may be some to send."""
        self.record_sender.offer(session)
        self._wake.set()

    def ack(self, received: int) -> bool:
        """Learn that the edge has received so many bytes of records in total; returns whether that
        is new."""
        is_new = self.record_sender.window.ack(received)
        if is_new:
            self._wake.set()
        return is_new

    @property
    def has_answers(self) -> bool:
        """Whether answers wait to be sent."""
        return bool(self._answers)

    async def room(self) -> None:
        """Return when few enough answers wait, so that no requests are read from a client that does
        not read its answers. Raises `CloseConnection` if the connection ends."""
        await self._room.wait()
        self.check_goes_on()

    def check_goes_on(self) -> None:
        """Raise the `CloseConnection` if the connection is to end."""
        if self._end is not None:
            raise self._end

    def answer(self, message: Message, latency: Latency | None = None) -> None:
        """Queue a message for the device, and count its bytes against the budget, because a small
        request may have a large answer. If far too much waits already, the connection is closed:
        nobody reads it."""
        if self._end is not None:
            return
        frame = encode(message)
        self._answer_bytes.inc(len(frame))
        self._waiting_bytes += len(frame)
        if self._waiting_bytes > self._most_bytes:
            self._answers.clear()
            self.end(
                CloseConnection(CloseCode.POLICY, "max_waiting_bytes: answers are not being read")
            )
            return
        self._meter.spend(BYTES, len(frame))
        self._answers.append((frame, latency))
        if self._waiting_bytes > self._room_bytes:
            self._room.clear()
        self._wake.set()

    def end(self, end: CloseConnection) -> None:
        """Close the connection after the answers that wait now."""
        self._end = self._end or end
        self._room.set()
        self._wake.set()

    async def write(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send what waits, as soon as `send` has room for it: answers first, then activation
        records. Raises `CloseConnection` when the connection is to end and everything was sent."""
        while True:
            self._wake.clear()
            if self._answers:
                await self._send_answer(send)
                continue
            if self._end is not None:
                raise self._end
            records, pause = self.record_sender.next()  # pause: seconds until there may be some
            if records is not None:
                await self._send_records(records, send)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _send_records(
        self, records: Activations, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send these activation records, and count their bytes."""
        frame = encode(records)
        self._metrics.sent_bytes.labels("records").inc(len(frame))
        self._metrics.record_bytes.labels(records.dtype).inc(len(records.payload))
        await send(frame)

    async def _send_answer(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the first answer that waits. If a forward made it, measure how long it took since
        its request, and how much of that was not the forward."""
        frame, latency = self._answers.popleft()
        self._waiting_bytes -= len(frame)
        if self._waiting_bytes <= self._room_bytes:
            self._room.set()
        await send(frame)
        if latency is not None:
            seconds = self._clock() - latency.arrived
            self._metrics.verify_seconds.observe(seconds)
            self._metrics.overhead_seconds.observe(seconds - latency.forward)
