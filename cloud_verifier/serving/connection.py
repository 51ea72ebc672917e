"""One websocket connection at the byte level: input is processed in small pieces, within a budget.

The websockets library parses everything that a read returns and answers all pings at once, even if
the sender does not read the pongs. So bytes are filtered here first. A piece is passed to the
library only while
* the connection's budget has room (`budgets.py`),
* the other end has read what was sent before, so that pongs cannot accumulate,
* and the messages before it have been handled.
Otherwise the socket is not read, and TCP makes the other end wait.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.protocol import Event

from cloud_verifier.logs import log
from cloud_verifier.sessions.budgets import BYTES, FRAMES, Meter
from moa.process.half_open import HalfOpen
from moa.process.secured import Secured
from moa.wire.limits import Limits

_PIECE = 1024
"""Bytes handed on at once: up to 170 empty pings, about 2 ms of work."""
_TURN_SECONDS = 0.001
"""How long one connection may use the event loop before others get their turn."""
_LONGEST_NAP = 0.25
_WORDS = b"this port speaks websocket: point edge-client at it\n"
_ONLY_GET = (
    b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_WORDS), _WORDS)
)
"""The library closes the connection on a POST without an answer."""


class Connection(ServerConnection):
    """Reads no more than its budget allows, and is dropped if the other end does not read."""

    arrived = 0.0
    """When its latest bytes arrived. A draft's waiting time starts then, however busy the loop is."""

    _limits: Limits
    _half_open: HalfOpen
    """Both are set by a subclass: the library creates the connections."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.meter = Meter(self._limits, time.monotonic())
        self.flooded: Callable[[str], None] = lambda limit: self.abort()
        """Called with the name of the limit if the other end floods."""
        self._bytes = bytearray()
        self._reading = True
        self._ended = False
        self._next: asyncio.Handle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """The other end's address, for the log."""
        address = self.remote_address
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")

    def abort(self) -> None:
        """Abort the connection."""
        self.transport.abort()

    # ---- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established, and secured where that is wanted."""
        super().connection_made(transport)
        self.recv_messages.pause = lambda: None
        self.recv_messages.resume = self._soon
        self._half_open.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self._half_open.leave(self)
        self.end()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        first = not self.arrived
        self.arrived = time.monotonic()
        if first and data[:1].isalpha() and not b"GET ".startswith(data[:4]):
            self.end()
            self.transport.write(_ONLY_GET)
            self.transport.close()
        elif not self._ended:
            self._bytes += data
            self._take()

    def eof_received(self) -> None:
        """End of input: treated as a lost connection."""
        self.end()
        super().eof_received()

    def pause_writing(self) -> None:
        """The other end does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.send_timeout, self._too_slow)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
        self._soon()

    def process_event(self, event: Event) -> None:
        """A frame, of whatever kind."""
        self.meter.spend(FRAMES)
        super().process_event(event)

    # ---- piece by piece

    def end(self) -> None:
        """Stop reading."""
        self._ended = True
        self._bytes.clear()
        if self._next is not None:
            self._next.cancel()

    def _soon(self) -> None:
        if self._next is None and not self._ended:
            self._next = self.loop.call_soon(self._again)

    def _again(self) -> None:
        self._next = None
        self._take()

    def _take(self) -> None:
        began = time.monotonic()
        while self._bytes and self._next is None and not self._ended:
            if self.paused or self.recv_messages.paused:
                break  # `resume_writing` and the queue of messages call again
            now = time.monotonic()
            if (wait := self.meter.wait(now)) > 0:
                self._hold_back(min(wait, _LONGEST_NAP), now)
                break
            if now - began > _TURN_SECONDS:
                self._soon()
                break
            piece = bytes(self._bytes[:_PIECE])
            del self._bytes[:_PIECE]
            self.meter.spend(BYTES, len(piece))
            super().data_received(piece)
        self._read(not self._bytes and not self._ended)

    def _hold_back(self, seconds: float, now: float) -> None:
        if limit := self.meter.held_back(seconds, now):
            self.end()
            self.flooded(limit)
        else:
            self._next = self.loop.call_later(seconds, self._again)

    def _read(self, reading: bool) -> None:
        if reading != self._reading and not self.transport.is_closing():
            self._reading = reading
            (self.transport.resume_reading if reading else self.transport.pause_reading)()

    def _too_slow(self) -> None:
        log.warning(
            "too slow a reader",
            extra={"peer": self.peer, "event": "slow_reader", "limit": "send_timeout"},
        )
        self.abort()


class SecuredConnection(Secured, Connection):
    """A `Connection` that is established when its TLS handshake is over."""


def connection_type(
    limits: Limits, half_open: HalfOpen, tls: ssl.SSLContext | None
) -> type[Connection]:
    """The class of one port's connections, with TLS or without."""
    parts = {
        "_limits": limits,
        "_half_open": half_open,
        "_tls": tls,
        "_handshake_seconds": limits.handshake_timeout,
    }
    return type("BoundedConnection", (Connection if tls is None else SecuredConnection,), parts)
