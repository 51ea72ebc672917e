"""The websocket server: handshakes, frames in and out, health and metrics over HTTP, and the drain. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Origin, Subprotocol

from cloud_verifier.auth import Authenticator
from cloud_verifier.channel import Channel
from cloud_verifier.logs import log
from cloud_verifier.metrics import CONTENT_TYPE
from cloud_verifier.outbox import HangUp
from cloud_verifier.service import Service
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.wire.codes import CloseCode
from moa.wire.versions import SUBPROTOCOL

_SWEEP_SECONDS = 1.0

Ready = Callable[[], str]
"""Empty when the model is well, else what is wrong with it."""


class _Connection(ServerConnection):
    """Knows when its latest bytes came in: from then on a draft waits for us, however busy the loop is."""

    arrived = 0.0

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        self.arrived = time.monotonic()
        super().data_received(data)


class Transport:
    """Serves a `Service` on a port."""

    def __init__(self, service: Service, settings: Settings, auth: Authenticator, ready: Ready) -> None:
        self._service, self._settings, self._auth, self._ready = service, settings, auth, ready
        self._server: Server | None = None

    @property
    def port(self) -> int:
        """Where it listens; tells which, when the settings left it to the system (port 0)."""
        if self._server is None:
            raise RuntimeError("the transport is not open")
        return int(next(iter(self._server.sockets)).getsockname()[1])

    @property
    def url(self) -> str:
        """The address for clients."""
        host = self._settings.host
        scheme = "wss" if self._settings.tls_cert else "ws"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Transport]:
        """Listen for as long as the context lasts."""
        limits = self._service.limits
        try:
            self._server = await serve(
                self._connection,
                self._settings.host,
                self._settings.port,
                ssl=_tls(self._settings),
                origins=[None, *(Origin(o) for o in self._settings.origins)],
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                process_request=self._request,
                server_header=None,
                compression=None,
                create_connection=_Connection,
                open_timeout=limits.handshake_timeout,
                ping_interval=limits.ping_interval,
                ping_timeout=limits.ping_timeout,
                close_timeout=2,
                max_size=limits.max_frame_bytes,
                max_queue=8,
                write_limit=limits.send_buffer_bytes,
                backlog=1024,
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self._settings.host}:{self._settings.port}: {error.strerror or error}"
            ) from None
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield self
        finally:
            sweeper.cancel()
            self._server.close(code=CloseCode.RESTART, reason="the verifier has stopped")
            await self._server.wait_closed()

    async def drain(self) -> None:
        """Goaway to everybody, then wait for what runs, within the limit."""
        seconds = self._service.limits.drain_seconds
        log.info("draining", extra={"event": "drain"})
        self._service.drain("the verifier is stopping", seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._service.idle:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # the writers' last frames go to their sockets

    # ---- HTTP

    async def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/health/live":
            return _reply(http.HTTPStatus.OK, "live\n")
        if path == "/health/ready":
            wrong = "draining" if self._service.draining else self._ready()
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if wrong else http.HTTPStatus.OK
            return _reply(status, f"{wrong or 'ready'}\n")
        principal = self._auth.principal(request.headers.get("Authorization"))
        if principal is None:
            log.warning("unauthorized", extra={"peer": _peer(connection), "event": "unauthorized"})
            return _reply(
                http.HTTPStatus.UNAUTHORIZED, "a valid bearer token is needed\n", {"WWW-Authenticate": "Bearer"}
            )
        if path == "/metrics":
            self._service.observe()
            return _reply(http.HTTPStatus.OK, self._service.metrics.page().decode(), {"Content-Type": CONTENT_TYPE})
        if path != "/":
            return _reply(http.HTTPStatus.NOT_FOUND, "not found\n")
        if self._service.draining:
            return _reply(http.HTTPStatus.SERVICE_UNAVAILABLE, "draining\n")
        if self._service.full(principal):
            return _reply(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n", {"Retry-After": "1"})
        connection.username = principal
        return None

    # ---- websockets

    async def _connection(self, connection: ServerConnection) -> None:
        if not isinstance(connection, _Connection):
            raise TypeError("connections are made by `create_connection`")
        if self._service.full(connection.username):  # handshakes that were under way together
            await connection.close(CloseCode.TRY_LATER, "too many connections")
            return
        channel = Channel(self._service, connection.username, _peer(connection))
        _bound_kernel_buffer(connection, self._service.limits.send_buffer_bytes)
        writer = asyncio.create_task(self._write(connection, channel))
        greeting = asyncio.create_task(self._await_hello(connection, channel))
        try:
            async for frame in connection:
                if not isinstance(frame, bytes):
                    raise HangUp(CloseCode.BAD_DATA, "frames are binary")
                await channel.receive(frame, connection.arrived)
        except HangUp as end:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(self._service.limits.send_timeout):
                    await self._flush(connection, channel)
            await connection.close(end.code, end.reason)
        except ConnectionClosed:
            pass
        except Exception:
            log.exception("a connection failed", extra={"peer": channel.peer, "event": "connection_failed"})
            await connection.close(CloseCode.INTERNAL, "internal error")
        finally:
            greeting.cancel()
            writer.cancel()
            channel.close()

    async def _write(self, connection: ServerConnection, channel: Channel) -> None:
        limits, outbox = self._service.limits, channel.outbox
        try:
            while True:
                outbox.wake.clear()
                frame, pause, spent = outbox.next(channel.sessions.values())
                if frame is None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await outbox.wake.wait()
                    continue
                async with asyncio.timeout(limits.send_timeout):
                    await connection.send(frame)
                outbox.sent(spent)
        except ConnectionClosed:
            pass
        except TimeoutError:
            log.warning("too slow a reader", extra={"peer": channel.peer, "event": "slow_reader"})
            connection.transport.abort()
        except HangUp as end:
            log.warning("hung up: %s", end, extra={"peer": channel.peer, "event": "hang_up"})
            await connection.close(end.code, end.reason)
        except Exception:
            log.exception("a connection failed", extra={"peer": channel.peer, "event": "connection_failed"})
            await connection.close(CloseCode.INTERNAL, "internal error")

    async def _flush(self, connection: ServerConnection, channel: Channel) -> None:
        while channel.outbox.has_answers:
            out = channel.outbox.next(channel.sessions.values())
            if out.frame is not None:
                await connection.send(out.frame)

    async def _await_hello(self, connection: ServerConnection, channel: Channel) -> None:
        try:
            async with asyncio.timeout(self._service.limits.hello_timeout):
                await channel.welcomed.wait()
        except TimeoutError:
            await connection.close(CloseCode.PROTOCOL_ERROR, "no hello")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._service.store.sweep()


def _reply(status: http.HTTPStatus, body: str, headers: dict[str, str] | None = None) -> Response:
    content = body.encode()
    fields = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(content)),
        "Cache-Control": "no-store",
        "Connection": "close",
    }
    return Response(status.value, status.phrase, Headers(fields | (headers or {})), content)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use the TLS certificate {settings.tls_cert}: {error.strerror or error}") from None
    return context


def _bound_kernel_buffer(connection: ServerConnection, size: int) -> None:
    """Bytes in the kernel's send buffer cannot be overtaken by a verdict, nor counted by us: keep them few."""
    sock = connection.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def _peer(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")
