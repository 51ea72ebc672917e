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
    _handshake: asyncio.Task[None] | None = None
    _early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is established."""
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
        """It is gone, perhaps before it was established."""
        if self._secured:
            super().connection_lost(error)
        else:
            self._half_open.leave(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the other protocol; the first may come with the last of the TLS handshake."""
        if self._secured:
            super().data_received(data)
        else:
            self._early += data

    def eof_received(self) -> None:
        """End of input."""
        if self._secured:
            super().eof_received()

    async def _secure(self, handshake: _Begun) -> None:
        try:
            transport = await handshake
        except OSError:  # TLS's own errors are among these
            self.transport.abort()
        else:
            if transport is not None and not transport.is_closing():
                self._secured = True
                super().connection_made(transport)
                if self._early:
                    super().data_received(self._early)
                return
        self._half_open.leave(self)


class _Begun:
    """A coroutine that has begun before anybody awaits it: in uvloop the first bytes may come
    before a task's turn."""

    def __init__(self, coroutine: Coroutine[Any, Any, asyncio.Transport | None]) -> None:
        self._coroutine = coroutine
        self._waits_for = coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, asyncio.Transport | None]:
        yield self._waits_for
        return (yield from self._coroutine.__await__())
