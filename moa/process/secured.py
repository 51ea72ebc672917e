"""TLS on a connection that was counted before its handshake."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Generator
from typing import Any, cast


class Secured(asyncio.Protocol):
    """Before another protocol class: that one's connection is established when the TLS handshake is
    over. The event loop would make a connection known only then: nobody could count it before, or
    drop it."""

    _tls: ssl.SSLContext
    _half_open: Any
    """Where connections `enter` and `leave`."""
    _handshake_seconds: float
    loop: asyncio.AbstractEventLoop
    transport: Any
    _secured = False
    """Whether the TLS handshake is over."""
    _handshake: asyncio.Task[None] | None = None
    _early = b""
    """Bytes of the other protocol that came before its connection was established."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin the TLS handshake."""
        self.transport = cast(asyncio.Transport, transport)
        self._half_open.enter(self)
        handshake = self.loop.start_tls(
            self.transport,
            self,
            self._tls,
            server_side=True,
            ssl_handshake_timeout=self._handshake_seconds,
        )
        self._handshake = self.loop.create_task(self._secure(_Begun(handshake)))

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the other protocol, if its connection was established; else forget the connection."""
        if self._secured:
            super().connection_lost(error)
        else:
            self._half_open.leave(self)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the other protocol; the first may come with the last of the TLS handshake."""
        if self._secured:
            super().data_received(data)
        else:
            self._early += data

    def eof_received(self) -> None:
        """Pass the end of input on."""
        if self._secured:
            super().eof_received()

    async def _secure(self, handshake: _Begun) -> None:
        """Wait for the TLS handshake, then establish the other protocol's connection, over TLS, and
        pass on the bytes that have come for it. Where the handshake fails, nobody is told of the
        connection."""
        try:
            transport = await handshake
        except OSError:  # TLS's own errors are among these
            self.transport.abort()
            self._half_open.leave(self)
            return
        if transport is None or transport.is_closing():
            self._half_open.leave(self)
            return
        self._secured = True
        super().connection_made(transport)
        if self._early:
            super().data_received(self._early)


class _Begun:
    """A coroutine that has begun before anybody awaits it: in uvloop the first bytes may come
    before a task's turn."""

    def __init__(self, coroutine: Coroutine[Any, Any, asyncio.Transport | None]) -> None:
        self._coroutine = coroutine
        self._waits_for = coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, asyncio.Transport | None]:
        yield self._waits_for
        return (yield from self._coroutine.__await__())
