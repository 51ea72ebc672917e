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
from collections.abc import Callable, Sequence
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.protocol import Event

from cloud_verifier.logs import log
from cloud_verifier.serving.auth import Caller
from cloud_verifier.serving.proxies import Proxies
from cloud_verifier.serving.unusable import Unusable
from cloud_verifier.sessions.budgets import BYTES, FRAMES, Meter
from moa.process.half_open import HalfOpen
from moa.process.secured import Secured, TlsFailure
from moa.wire.limits import Limits

_PIECE = 1024
"""Bytes handed on at once: up to 170 empty pings, about 2 ms of work."""
_FIRST = 8
"""Bytes of a connection's first ones that are kept: they tell what it speaks."""
_TURN_SECONDS = 0.001
"""How long one connection may use the event loop before others get their turn."""
_LONGEST_NAP = 0.25
"""Seconds that a connection over its budget is held back at once, at most."""
_ONLY_GET_LINE = b"this port speaks websocket: point edge-client at it\n"
_ONLY_GET = (
    b"HTTP/1.1 405 Method Not Allowed\r\nAllow: GET\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_ONLY_GET_LINE), _ONLY_GET_LINE)
)
"""The answer to another method. The library closes the connection on a POST without one."""


class Connection(ServerConnection):
    """Reads no more than its budget allows, and is dropped if the other end does not read."""

    arrived = 0.0
    """When its latest bytes arrived. A draft's waiting time starts then, however busy the loop is."""

    _limits: Limits
    _half_open: HalfOpen
    _unusable: Unusable
    """All are set by a subclass: the library creates the connections."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Make a connection for the websockets library, with a budget of its own."""
        super().__init__(*positional, **named)
        self.meter = Meter(self._limits, time.monotonic())
        self.flooded: Callable[[str], None] = lambda limit: self.abort()
        """Called with the name of the limit if the other end floods."""
        self.caller: Caller | None = None
        """Who has opened it; None before its handshake is checked."""
        self._peer = ""
        """The other end's address, which the socket forgets when it is closed; behind a proxy of
        ours the client's."""
        self._first = b""
        """What came at first."""
        self._bytes = bytearray()
        """What was read and not yet handed on."""
        self._reading = True
        """Whether the socket is read."""
        self._ended = False
        """Whether nothing more is handed on."""
        self._next: asyncio.Handle | None = None
        """The call that goes on handing on, if one is scheduled."""
        self._send_deadline: asyncio.TimerHandle | None = None
        """Ends the connection if the other end does not read until then."""

    @property
    def peer(self) -> str:
        """The other end's address, for the log."""
        return self._peer or _as_text(self.remote_address)

    def came_through(self, proxies: Proxies, forwarded_for: Sequence[str]) -> None:
        """Take the client's address from what a proxy of ours says in these headers."""
        self._peer = proxies.client(self.peer, forwarded_for)

    def abort(self) -> None:
        """Abort the connection."""
        self.transport.abort()

    # ---- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read: the connection is established, and secured where that is wanted."""
        super().connection_made(transport)
        self._peer = _as_text(self.remote_address)
        # The library would pause and resume the socket itself; here that is `_hand_on`'s to decide.
        self.recv_messages.pause = lambda: None
        self.recv_messages.resume = self._hand_on_soon
        self._half_open.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Stop everything: the connection is gone."""
        self._half_open.leave(self)
        self.end()
        if self._send_deadline is not None:
            self._send_deadline.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the socket. A first request by another method than GET comes from a
        browser or a client that takes this port for an API: it is answered and ended here."""
        is_first = not self.arrived
        self.arrived = time.monotonic()
        # The first bytes may be fewer than four: then they are a part of "GET ", or they are not.
        is_other_method = data[:1].isalpha() and not b"GET ".startswith(data[:4])
        if is_first:
            self._first = data[:_FIRST]
        if is_first and is_other_method:
            self.end()
            self.transport.write(_ONLY_GET)
            self.transport.close()
        elif not self._ended:
            self._bytes += data
            self._hand_on()

    def eof_received(self) -> None:
        """Treat the end of input as a lost connection."""
        self.end()
        super().eof_received()

    def pause_writing(self) -> None:
        """Give the other end, which does not read, so much time to do so."""
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self._limits.send_timeout, self._too_slow)

    def resume_writing(self) -> None:
        """Go on: the other end reads again."""
        super().resume_writing()
        if self._send_deadline is not None:
            self._send_deadline.cancel()
        self._hand_on_soon()

    async def handshake(self, *positional: Any, **named: Any) -> None:
        """Open the websocket, as the library does it, and take notice where that fails."""
        try:
            await super().handshake(*positional, **named)
        finally:
            error = self.protocol.handshake_exc
            if self.request is None or error is not None:
                self._unusable.note(self.peer, self._first, error)

    def process_event(self, event: Event) -> None:
        """Charge the budget for a frame, of whatever kind."""
        self.meter.spend(FRAMES)
        super().process_event(event)

    # ---- piece by piece

    def end(self) -> None:
        """Stop reading."""
        self._ended = True
        self._bytes.clear()
        if self._next is not None:
            self._next.cancel()

    def _hand_on_soon(self) -> None:
        """Go on handing on in the next turn of the event loop."""
        if self._next is None and not self._ended:
            self._next = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Hand bytes on again: the call that was scheduled."""
        self._next = None
        self._hand_on()

    def _hand_on(self) -> None:
        """Pass the bytes that were read on to the websockets library, a piece at a time, for as
        long as the connection's budget and its reader allow. The socket is read only when none are
        left, so TCP makes the other end wait."""
        started = time.monotonic()
        while self._bytes and self._next is None and not self._ended:
            if self.paused or self.recv_messages.paused:
                break  # `resume_writing` and the queue of messages call again
            now = time.monotonic()
            wait = self.meter.wait(now)
            if wait > 0:
                self._hold_back(min(wait, _LONGEST_NAP), now)
                break
            if now - started > _TURN_SECONDS:
                self._hand_on_soon()  # after the other connections
                break
            piece = bytes(self._bytes[:_PIECE])
            del self._bytes[:_PIECE]
            self.meter.spend(BYTES, len(piece))
            super().data_received(piece)
        self._set_reading(not self._bytes and not self._ended)

    def _hold_back(self, seconds: float, now: float) -> None:
        """Pass nothing on for so many seconds. A connection that is held back for most of the time
        floods: it is ended."""
        limit = self.meter.held_back(seconds, now)
        if limit:
            self.end()
            self.flooded(limit)
        else:
            self._next = self.loop.call_later(seconds, self._go_on)

    def _set_reading(self, reading: bool) -> None:
        """Read the socket, or let TCP make the other end wait."""
        if reading == self._reading or self.transport.is_closing():
            return
        self._reading = reading
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _too_slow(self) -> None:
        """End the connection of a reader that is too slow."""
        log.warning(
            "too slow a reader",
            extra={"peer": self.peer, "event": "slow_reader", "limit": "send_timeout"},
        )
        self.abort()


def _as_text(address: Any) -> str:
    """A socket's address, for the log; empty if it is not known."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")


class SecuredConnection(Secured, Connection):
    """A `Connection` that is established when its TLS handshake is over."""

    def unsecured(self, failure: TlsFailure) -> None:
        """Take notice of a TLS handshake that has failed."""
        self._unusable.unsecured(self.peer, failure)

    def overdone(self) -> None:
        """End a connection that sends records which bring nothing, and say so."""
        log.warning(
            "closed: too many records of TLS that bring nothing",
            extra={"peer": self.peer, "event": "flood"},
        )
        super().overdone()


def connection_type(
    limits: Limits, half_open: HalfOpen, unusable: Unusable, tls: ssl.SSLContext | None
) -> type[Connection]:
    """Returns the class of a port's connections, with or without TLS. The websockets library makes
    the connections itself, so what they share is put into the class."""
    parts = {
        "_limits": limits,
        "_half_open": half_open,
        "_unusable": unusable,
        "_tls": tls,
        "_handshake_seconds": limits.handshake_timeout,
    }
    base = Connection if tls is None else SecuredConnection
    return type("BoundedConnection", (base,), parts)
