"""The connection to the verifier: dialled in the background, again and again, so that the decode loop never waits.

What arrives lies in `inbox`, and `news` is set. What the messages mean is the business of the loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, NegotiationError
from websockets.typing import Subprotocol

from edge_client.turn.estimates import RoundTrip
from moa.errors import LinkError, MoaError, ProtocolError, RemoteError, UsageError
from moa.wire import (
    FEATURES,
    PROTOCOL_VERSIONS,
    SUBPROTOCOL,
    Code,
    Refusal,
    decode_server,
    encode,
    remote_error,
)
from moa.wire.messages import ClientMessage, Error, Goaway, Hello, ServerMessage, Welcome
from moa.wire.versions import SESSION_HEADER

_MAX_FRAME = 16 * 1024 * 1024
_SEND_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the verifier is and what is said to it first."""

    url: str
    token: str = ""
    hello: Hello
    tls: ssl.SSLContext | None = None
    connect_seconds: float = 10.0
    backoff_seconds: tuple[float, float] = (0.1, 5.0)
    """The first wait before dialling again, and the longest; each is drawn between half of it and all of it."""


@dataclass(eq=False)
class LinkToVerifier:
    """One connection at a time, and a new one whenever it is lost."""

    endpoint: Endpoint
    inbox: deque[tuple[float, ServerMessage]] = field(default_factory=deque)
    """What arrived, and when, in `perf_counter` seconds: the loop may have been drafting at that moment."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a message arrived or the link came or went."""
    welcome: Welcome | None = None
    up: bool = False
    generation: int = 0
    """Counts connections that were welcomed."""
    refused: MoaError | None = None
    """Why the verifier will never take us; it is not dialled again."""
    last_error: MoaError | None = None
    """Why the latest attempt failed."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Says to proxies and replicas that it is us again: the verifier that has our sessions is the one we want."""
    sent_bytes: int = 0
    received_bytes: int = 0
    server_date: str = ""
    """The Date header of the handshake, if there was one."""
    last_heard: float = 0.0
    """When a frame last arrived, in `perf_counter` seconds."""
    rtt: RoundTrip = field(default_factory=RoundTrip)
    _connection: ClientConnection | None = None
    _retry_after: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LinkToVerifier]:
        """Dial in the background for as long as the body runs."""
        task = asyncio.create_task(self._keep_connected())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def send(self, message: ClientMessage) -> None:
        """Send now, or lose the connection trying: what was not answered is sent again after it returns."""
        connection = self._connection
        if connection is None or not self.up:
            return
        frame = encode(message)
        try:
            if connection.transport.get_write_buffer_size():
                async with asyncio.timeout(_SEND_SECONDS):
                    await connection.send(frame)
            else:  # goes straight to the socket: there is nothing to wait for
                await connection.send(frame)
            self.sent_bytes += len(frame)
        except (ConnectionClosed, TimeoutError, OSError):
            self.drop()

    def drop(self) -> None:
        """Give the connection up: it seems dead. Dialling goes on."""
        if self._connection is not None:
            self._connection.transport.abort()
        self.up = False
        self.news.set()

    async def wait(self, seconds: float | None) -> None:
        """Until there is news, or the time is over."""
        if self.inbox:
            return
        timer = asyncio.get_running_loop().call_later(seconds, self.news.set) if seconds is not None else None
        try:
            await self.news.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self.news.clear()

    # ---- in the background

    async def _keep_connected(self) -> None:
        first, longest = self.endpoint.backoff_seconds
        pause = first
        while self.refused is None:
            before = self.generation
            try:
                await self._one_connection()
            except MoaError as error:
                self.last_error = error
                if not isinstance(error, LinkError) and not error.retryable:
                    self.refused = error
            self.up, self._connection = False, None
            self.news.set()
            if self.refused is not None:
                return
            pause = first if self.generation > before else min(2 * pause, longest)
            # Jitter: a thousand devices that lost the same cell must not all come back in the same instant.
            await asyncio.sleep(max(self._retry_after, pause * random.uniform(0.5, 1.0)))
            self._retry_after = 0.0

    async def _one_connection(self) -> None:
        """Dial, say hello, and read until the connection ends."""
        endpoint = self.endpoint
        headers = {SESSION_HEADER: self.key}
        if endpoint.token:
            headers["Authorization"] = f"Bearer {endpoint.token}"
        try:
            async with connect(
                endpoint.url,
                ssl=endpoint.tls,
                additional_headers=headers,
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                open_timeout=endpoint.connect_seconds,
                close_timeout=0.5,
                ping_interval=5.0,
                ping_timeout=10.0,
                max_size=_MAX_FRAME,
            ) as connection:
                await self._converse(connection)
        except InvalidStatus as error:
            raise _status_error(error) from None
        except InvalidURI as error:
            raise UsageError(f"{endpoint.url!r} is no verifier address: {error}", hint="like ws://host:8765") from None
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"the verifier's certificate is not trusted: {error.verify_message}",
                hint="renew it, or pass --tls-ca with the authority that signed it",
            ) from None
        except ssl.SSLError as error:
            raise UsageError(
                f"TLS with {endpoint.url} failed: {error.reason or error}", hint="check wss:// and the port"
            ) from None
        except (NegotiationError, InvalidHandshake) as error:
            raise LinkError(f"{endpoint.url} does not answer like a verifier: {error}") from None
        except (ConnectionClosed, TimeoutError, OSError, EOFError) as error:
            serving = "is `cloud-verifier serve` running there" + (", with --tls-cert?" if endpoint.tls else "?")
            raise LinkError(f"cannot reach {endpoint.url}: {_cause(error)}", hint=serving) from None

    async def _converse(self, connection: ClientConnection) -> None:
        if connection.subprotocol != SUBPROTOCOL:
            raise ProtocolError(
                f"{self.endpoint.url} does not speak {SUBPROTOCOL}: it is not a verifier of this version"
            )
        self._connection = connection
        if connection.response is not None:
            self.server_date = connection.response.headers.get("Date", "")
        said = perf_counter()
        frame = encode(self.endpoint.hello)
        await connection.send(frame)
        self.sent_bytes += len(frame)
        async with asyncio.timeout(self.endpoint.connect_seconds):
            message = await self._receive(connection)
        if isinstance(message, Error):
            raise _refusal(message)
        if not isinstance(message, Welcome):
            raise ProtocolError(f"the verifier began with {type(message).__name__} instead of a welcome")
        if message.version not in PROTOCOL_VERSIONS:
            raise ProtocolError(f"the verifier chose protocol version {message.version}", hint="update the older end")
        self.rtt.add(perf_counter() - said)
        self.welcome, self.up = message, True
        self.generation += 1
        self.news.set()
        while True:
            message = await self._receive(connection)
            if isinstance(message, Goaway):
                self._retry_after = message.retry_after_ms / 1000
                continue
            self.inbox.append((self.last_heard, message))
            self.news.set()

    async def _receive(self, connection: ClientConnection) -> ServerMessage:
        frame = await connection.recv(decode=False)
        self.last_heard = perf_counter()
        self.received_bytes += len(frame)
        try:
            return decode_server(frame)
        except Refusal as error:
            raise ProtocolError(f"the verifier sent what is no message: {error}") from None


def hello(*, client: str, tokenizer: str, target: str, drafter: str) -> Hello:
    """The first message: what we speak, and which drafter and tokenizer we hold."""
    return Hello(
        versions=list(PROTOCOL_VERSIONS),
        features=sorted(FEATURES),
        client=client,
        tokenizer=tokenizer,
        target=target,
        drafter=drafter,
    )


def _status_error(error: InvalidStatus) -> MoaError:
    status = error.response.status_code
    if status in (401, 403):
        return RemoteError("unauthorized", f"the verifier refused the token (HTTP {status})", hint="pass --token")
    if status in (429, 503):
        return LinkError(f"the verifier is busy (HTTP {status})")
    return ProtocolError(f"the address answers HTTP {status}, not like a verifier", hint="check host, port and path")


def _refusal(message: Error) -> MoaError:
    """Why the verifier does not take us, with what to do about it."""
    hints = {
        Code.TOKENIZER: "use the bundle that was made for this target",
        Code.TARGET: "use the bundle that was made for this target, or the address of its verifier",
        Code.VERSION: "update the older end",
    }
    error = remote_error(message)
    error.hint = hints.get(Code(message.code), error.hint) if message.code in set(Code) else error.hint
    return error


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
