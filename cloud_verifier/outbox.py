"""What one connection has to send: answers first, activation records only when there are none and the link has room.

Runs in the event loop; no sockets, no torch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cloud_verifier.courier import Courier
from cloud_verifier.metrics import Metrics
from cloud_verifier.sessions import Session
from moa.wire.codec import encode
from moa.wire.codes import CloseCode
from moa.wire.limits import Limits
from moa.wire.messages import Message, RecordContract

_MAX_ANSWERS = 4096  # frames waiting for one connection; a client that reads its answers never comes near


class HangUp(Exception):
    """The connection must be closed, with this code and reason, after what is still to be sent."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Spent(NamedTuple):
    """When the draft behind a verdict arrived, by the clock, and the seconds of its forward."""

    arrived: float
    forward: float


class Outgoing(NamedTuple):
    """A frame to send now; or none, and how many seconds to wait for one (None: until woken)."""

    frame: bytes | None
    pause: float | None = None
    spent: Spent | None = None


class Outbox:
    """One connection's frames on their way out."""

    def __init__(self, metrics: Metrics, limits: Limits, clock: Callable[[], float]) -> None:
        self.wake = asyncio.Event()
        self._metrics, self._ceiling, self._clock = metrics, limits.record_window_bytes, clock
        self._answer_bytes = metrics.sent_bytes.labels("answers")
        self.courier = Courier(None, self._ceiling, clock)
        self._answers: deque[Outgoing] = deque()
        self._overflown = False

    def carry(self, contract: RecordContract | None) -> None:
        """Records go along from now on, if that is what was agreed."""
        self.courier = Courier(contract, self._ceiling, self._clock)

    @property
    def has_answers(self) -> bool:
        """Whether answers wait to be sent."""
        return bool(self._answers)

    def answer(self, message: Message, spent: Spent | None = None) -> None:
        """Queue an answer."""
        if len(self._answers) >= _MAX_ANSWERS:
            self._overflown = True
            self._answers.clear()
            self.wake.set()
        if self._overflown:
            return
        frame = encode(message)
        self._answer_bytes.inc(len(frame))
        self._answers.append(Outgoing(frame, None, spent))
        self.wake.set()

    def next(self, sessions: Iterable[Session]) -> Outgoing:
        """What to send now."""
        if self._overflown:
            raise HangUp(CloseCode.POLICY, "answers are not being read")
        if self._answers:
            return self._answers.popleft()
        message, pause = self.courier.next(sessions)
        if message is None:
            return Outgoing(None, pause)
        frame = encode(message)
        self._metrics.sent_bytes.labels("records").inc(len(frame))
        self._metrics.record_bytes.labels(message.dtype).inc(len(message.payload))
        self._metrics.record_rows.labels(message.dtype).inc(message.rows)
        return Outgoing(frame)

    def sent(self, spent: Spent | None) -> None:
        """The socket has taken a frame."""
        if spent is not None:
            seconds = self._clock() - spent.arrived
            self._metrics.verify_seconds.observe(seconds)
            self._metrics.overhead_seconds.observe(seconds - spent.forward)
