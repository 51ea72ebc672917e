"""The websocket server of `cloud-verifier serve`: its port, TLS and sockets. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from cloud_verifier.conversation import converse
from cloud_verifier.door import Door, Reply
from cloud_verifier.service import Service
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.wire.codes import CloseCode
from moa.wire.versions import SUBPROTOCOL


class _Connection(ServerConnection):
    """Knows when its latest bytes came in: from then on a draft waits for us, however busy the loop is."""

    arrived = 0.0
    head = b""
    """What somebody else has read from the socket already."""

    @property
    def peer(self) -> str:
        """The other end's address."""
        address = self.remote_address
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        super().connection_made(transport)
        if self.head:
            self.data_received(self.head)

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        self.arrived = time.monotonic()
        super().data_received(data)


class Transport:
    """Serves a `Service` on a port."""

    def __init__(self, service: Service, settings: Settings, door: Door) -> None:
        self._service, self._settings, self._door = service, settings, door
        self._server: Server | None = None
        self._tls = _tls(settings)
        limits = service.limits
        self._protocol: dict[str, Any] = {
            "origins": [None, *(Origin(o) for o in settings.origins)],
            "subprotocols": [Subprotocol(SUBPROTOCOL)],
            "max_size": limits.max_frame_bytes,
        }
        self._pace: dict[str, Any] = {
            "ping_interval": limits.ping_interval,
            "ping_timeout": limits.ping_timeout,
            "close_timeout": 2,
            "max_queue": 8,
            "write_limit": limits.send_buffer_bytes,
        }

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
    async def open(self, *, listen: bool = True) -> AsyncIterator[Transport]:
        """Listen for as long as the context lasts; without `listen` serve only the sockets that `adopt` is given."""
        limits = self._service.limits
        where: dict[str, Any] = {"host": self._settings.host, "port": self._settings.port}
        if not listen:
            where = {"unix": True, "sock": _unreachable()}
        try:
            self._server = await serve(
                self._connection,
                ssl=self._tls,
                process_request=self._request,
                server_header=None,
                compression=None,
                create_connection=_Connection,
                open_timeout=limits.handshake_timeout,
                backlog=1024,
                **where,
                **self._protocol,
                **self._pace,
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self._settings.host}:{self._settings.port}: {error.strerror or error}"
            ) from None
        try:
            yield self
        finally:
            self._server.close(code=CloseCode.RESTART, reason="the verifier has stopped")
            await self._server.wait_closed()

    async def adopt(self, sock: socket.socket, head: bytes = b"") -> None:
        """Serve a connection that another process has accepted, and of which it has read `head`."""
        if self._server is None:
            raise RuntimeError("the transport is not open")
        connection = _Connection(ServerProtocol(**self._protocol), self._server, **self._pace)
        connection.head = head
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls)

    # ---- HTTP

    async def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        answer = await self._door.answer(request.path, request.headers.get("Authorization"), connection.remote_address)
        if isinstance(answer, Reply):
            return Response(answer.status.value, answer.status.phrase, Headers(answer.headers), answer.content)
        connection.username = answer
        return None

    # ---- websockets

    async def _connection(self, connection: ServerConnection) -> None:
        if not isinstance(connection, _Connection):
            raise TypeError("connections are made by `create_connection`")
        _bound_kernel_buffer(connection, self._service.limits.send_buffer_bytes)
        await converse(self._service, connection, connection.username)


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


def _unreachable() -> socket.socket:
    """A socket to listen on that nobody can find: the library serves no connection without one."""
    sock = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory() as folder:
        sock.bind(f"{folder}/nobody")
    return sock


def _bound_kernel_buffer(connection: ServerConnection, size: int) -> None:
    """Bytes in the kernel's send buffer cannot be overtaken by a verdict, nor counted by us: keep them few."""
    sock = connection.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
