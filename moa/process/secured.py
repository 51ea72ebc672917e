"""TLS on a connection that was counted before its handshake, and whose records are counted."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Literal, cast

from moa.token_bucket import TokenBucket

_HEAD_BYTES = 5
"""Of a record: its type, a version, and how many bytes follow."""
_SMALL_BYTES = 256
"""A record of fewer bytes may bring none for us. A peer may ask for new keys (KeyUpdate) as often as
it likes, in 27 bytes each, for which OpenSSL takes about 20 microseconds and writes as many back."""
_SMALL_PER_SECOND = 1000.0
"""Small records of a connection that has sent a request: more than the messages that a device sends
for all its conversations."""
_SMALL_AT_ONCE = 2000.0
_PLAIN = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""What OpenSSL says of a request without TLS."""


@dataclass(frozen=True, slots=True)
class TlsFailure:
    """Why a TLS handshake has failed."""

    kind: Literal["no_tls", "tls"]
    """no_tls: the other end speaks plain HTTP."""
    reason: str
    """In a few words; none where the kind says it all."""


def failure_of_tls(error: OSError) -> TlsFailure:
    """Why a TLS handshake has failed by this error."""
    if not isinstance(error, ssl.SSLError):
        # Python's own clients leave so where they do not trust a certificate.
        return TlsFailure(
            "tls", "the other end did not go on with it: does it trust the certificate?"
        )
    reason = error.reason or ""
    if reason in _PLAIN:
        return TlsFailure("no_tls", "")
    return TlsFailure("tls", reason.lower().replace("_", " "))


class Secured(asyncio.Protocol):
    """Before another protocol class: that one's connection is established when the TLS handshake is
    over. The event loop would make a connection known only then: nobody could count it before, or
    drop it."""

    _tls: ssl.SSLContext
    _half_open: Any
    """Where connections `enter` and `leave`, and which says which of them it holds."""
    _handshake_seconds: float
    loop: asyncio.AbstractEventLoop
    transport: Any
    _most_of_a_stranger = 64
    """Small records of a connection that is half open: a handshake and a request take a few."""
    _secured = False
    """Whether the TLS handshake is over."""
    _heard = False
    """Whether anything has come."""
    _handshake: asyncio.Task[None] | None = None
    _early = b""
    """Bytes of the other protocol that came before its connection was established."""
    _of_a_stranger = 0
    """Small records while the connection is half open; of a request, where there are several."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin the TLS handshake."""
        self.transport = cast(asyncio.Transport, transport)
        self._small = TokenBucket(_SMALL_PER_SECOND, _SMALL_AT_ONCE, time.monotonic())
        self._half_open.enter(self)
        handshake = self.loop.start_tls(
            self.transport,
            self,
            self._tls,
            server_side=True,
            ssl_handshake_timeout=self._handshake_seconds,
        )
        begun = _Begun(handshake)
        # It has put TLS between the socket and us; the records are counted before that.
        tls = self.transport.get_protocol()
        self.transport.set_protocol(_Counted(tls, _SmallRecords(), self._may_send_more))
        self._handshake = self.loop.create_task(self._secure(begun))

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

    def overdone(self) -> None:
        """End a connection that sends records which bring nothing."""
        self.transport.abort()

    def unsecured(self, failure: TlsFailure) -> None:
        """Take notice that the TLS handshake has failed."""

    def _may_send_more(self, small_records: int) -> bool:
        """Count small records, and end the connection if there are too many."""
        self._heard = True
        if self in self._half_open:
            self._of_a_stranger += small_records
            is_fine = self._of_a_stranger <= self._most_of_a_stranger
        else:
            self._small.spend(small_records)
            is_fine = self._small.level(time.monotonic()) >= 0
        if not is_fine:
            self.overdone()
        return is_fine

    async def _secure(self, handshake: _Begun) -> None:
        """Wait for the TLS handshake, then establish the other protocol's connection, over TLS, and
        pass on the bytes that have come for it. Where the handshake fails, nobody is told of the
        connection."""
        try:
            transport = await handshake
        except OSError as error:  # TLS's own errors are among these
            if self._heard:  # else it is a probe of a load balancer
                self.unsecured(failure_of_tls(error))
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


class _SmallRecords:
    """Finds the records of TLS in a stream of bytes, by their heads, and counts the small ones."""

    def __init__(self) -> None:
        self._head = bytearray()
        """What has come of the next record's head."""
        self._body_left = 0
        """Bytes of the record that are still to come."""

    def count(self, data: memoryview) -> int:
        """How many small records begin in these bytes."""
        small = 0
        place = 0
        while place < len(data):
            if self._body_left:
                passed = min(self._body_left, len(data) - place)
                self._body_left -= passed
                place += passed
                continue
            part = data[place : place + _HEAD_BYTES - len(self._head)]
            self._head += part
            place += len(part)
            if len(self._head) == _HEAD_BYTES:
                self._body_left = int.from_bytes(self._head[-2:], "big")
                small += self._body_left < _SMALL_BYTES
                self._head.clear()
        return small


class _Counted(asyncio.BufferedProtocol):
    """Stands before TLS, and passes what arrives on to it as long as it may be."""

    def __init__(
        self, tls: Any, records: _SmallRecords, may_send_more: Callable[[int], bool]
    ) -> None:
        self._tls = tls
        self._records = records
        self._may_send_more = may_send_more
        self._buffer = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are put."""
        self._buffer = memoryview(self._tls.get_buffer(sizehint))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        if self._may_send_more(self._records.count(self._buffer[:nbytes])):
            self._tls.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        """The other end sends no more."""
        keeps_open: bool | None = self._tls.eof_received()
        return keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._tls.connection_lost(exc)

    def pause_writing(self) -> None:
        """The other end does not read."""
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        self._tls.resume_writing()
