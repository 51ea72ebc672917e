"""Connections whose TLS handshake is their own, so that they are half-open, and counted, from their first byte on.

The event loop would make a connection known only after its TLS handshake. Until then nobody could count it, or drop it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Generator
from typing import Any, cast

from cloud_verifier.serving.connection import Connection
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.process.half_open import HalfOpen
from moa.wire.limits import Limits


def tls(settings: Settings) -> ssl.SSLContext | None:
    """What `--tls-cert` and `--tls-key` say; None for a port without TLS."""
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use the TLS certificate {settings.tls_cert}: {error.strerror or error}") from None
    return context


class SecuredConnection(Connection):
    """A `Connection` that is established when its TLS handshake is over."""

    _tls: ssl.SSLContext
    _secured = False
    _handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is established."""
        self.transport = cast(asyncio.Transport, transport)
        self._half_open.enter(self)
        handshake = self.loop.start_tls(
            self.transport, self, self._tls, server_side=True, ssl_handshake_timeout=self._limits.handshake_timeout
        )
        self._handshake = self.loop.create_task(self._secure(_Begun(handshake)))

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone, perhaps before it was established."""
        if self._secured:
            super().connection_lost(error)
        else:
            self._half_open.leave(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the websocket; the first may come with the last of the TLS handshake."""
        if self._secured:
            super().data_received(data)
        else:
            self.head += data

    def eof_received(self) -> None:
        """End of input."""
        if self._secured:
            super().eof_received()

    async def _secure(self, handshake: _Begun) -> None:
        try:
            transport = await handshake
        except OSError:  # TLS's own errors are among these
            self.abort()
        else:
            if transport is not None and not transport.is_closing():
                self._secured = True
                super().connection_made(transport)
                return
        self._half_open.leave(self)


class _Begun:
    """A coroutine that has begun before anybody awaits it: in uvloop the first bytes may come before a task's turn."""

    def __init__(self, coroutine: Coroutine[Any, Any, asyncio.Transport | None]) -> None:
        self._coroutine, self._waits_for = coroutine, coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, asyncio.Transport | None]:
        yield self._waits_for
        return (yield from self._coroutine.__await__())


def kind(limits: Limits, half_open: HalfOpen, tls: ssl.SSLContext | None) -> type[Connection]:
    """The class of one server's connections."""
    if tls is None:
        return type("BoundedConnection", (Connection,), {"_limits": limits, "_half_open": half_open})
    return type("BoundedConnection", (SecuredConnection,), {"_limits": limits, "_half_open": half_open, "_tls": tls})
