"""The websocket server of `cloud-verifier serve`: its port, TLS and sockets. No torch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.typing import Origin, Subprotocol

from cloud_verifier.logs import log
from cloud_verifier.serving.admission import FAILED, Admission, Reply
from cloud_verifier.serving.auth import authorizations
from cloud_verifier.serving.connection import Connection, connection_type
from cloud_verifier.serving.conversation import converse
from cloud_verifier.serving.proxies import Proxies
from cloud_verifier.serving.unusable import Unusable
from cloud_verifier.sessions.service import Service
from cloud_verifier.settings import Settings
from moa.process.half_open import HalfOpen, room_for_connections
from moa.process.listening import Port
from moa.wire.codes import CloseCode
from moa.wire.versions import SUBPROTOCOL

_BACKLOG = 128
"""Connections that the system holds for us; and that are accepted at once: more would delay all
others."""


class Transport:
    """Serves a `Service` on a port."""

    def __init__(self, service: Service, settings: Settings, admission: Admission) -> None:
        """Make a server of this service, which does not listen yet."""
        self._service = service
        self._settings = settings
        self._admission = admission
        self._server: Server | None = None
        self._port: Port | None = None
        limits = service.limits
        # Arguments of the websockets library: what a handshake must have, and the timings.
        self._protocol: dict[str, Any] = {
            "origins": [None, *(Origin(origin) for origin in settings.origins)],
            "subprotocols": [Subprotocol(SUBPROTOCOL)],
            "max_size": limits.max_frame_bytes,
        }
        self._pace: dict[str, Any] = {
            "ping_interval": limits.ping_interval,
            "ping_timeout": limits.ping_timeout,
            "close_timeout": 2,
            "max_queue": 2,
            "write_limit": limits.send_buffer_bytes,
        }
        self._half_open = HalfOpen(limits.max_half_open, self._dropped)
        self._proxies = Proxies()
        unusable = Unusable(service.metrics)
        self._kind = connection_type(limits, self._half_open, unusable, settings.tls)
        service.metrics.half_open.set_function(lambda: len(self._half_open))

    @property
    def port(self) -> int:
        """The port; the chosen one if the settings say 0."""
        return self._listening.number

    @property
    def url(self) -> str:
        """The address for clients."""
        return self._listening.url("wss" if self._settings.tls_cert else "ws")

    @property
    def _listening(self) -> Port:
        """The port; a `RuntimeError` before `open`."""
        if self._port is None:
            raise RuntimeError("the transport does not listen")
        return self._port

    @contextlib.asynccontextmanager
    async def open(self, port: Port) -> AsyncIterator[Transport]:
        """Listen on `port` for websockets and plain HTTP while the body runs."""
        self._fit_descriptors()
        self._port = port
        self._server = await serve(
            self._connection,
            process_request=self._request,
            server_header=None,
            compression=None,
            create_connection=self._kind,
            open_timeout=self._service.limits.handshake_timeout,
            backlog=_BACKLOG,
            sock=port.listen(_BACKLOG, self._exhausted),
            **self._protocol,
            **self._pace,
        )
        try:
            yield self
        finally:
            self._half_open.close()
            self._server.close(code=CloseCode.RESTART, reason="the verifier has stopped")
            await self._server.wait_closed()

    def _fit_descriptors(self) -> None:
        """Lower the limits of connections and of half-open ones to what this process's limit of
        open files allows; a warning says so."""
        limits = self._service.limits
        ports = 2 if self._settings.openai else 1
        most, most_half_open = room_for_connections(
            limits.max_connections, limits.max_half_open, ports=ports
        )
        if most < limits.max_connections or most_half_open < limits.max_half_open:
            log.warning(
                "this process may open few files: at most %d connections and %d half-open ones (raise `ulimit -n`)",
                most,
                most_half_open,
                extra={"event": "descriptors"},
            )
        self._service.max_connections = most
        self._half_open.most = most_half_open

    def _dropped(self, peer: str, count: int) -> None:
        """Log that a half-open connection of an address was dropped, which had so many."""
        log.warning(
            "too many half-open connections: the oldest of this address is dropped, it has %d",
            count,
            extra={"peer": peer, "event": "half_open", "limit": "max_half_open"},
        )
        self._service.metrics.half_open_dropped.inc()

    def _exhausted(self, peer: str) -> None:
        """Make room after a connection was refused for lack of file descriptors."""
        log.error(
            "this process has no free file descriptor: a connection was refused (raise `ulimit -n`)",
            extra={"peer": peer, "event": "descriptors"},
        )
        self._half_open.make_room()

    # ---- HTTP

    async def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Returns the response to an HTTP request; None for one whose websocket may open."""
        ours = _ours(connection)
        headers = request.headers
        try:
            self._half_open.leave(ours)  # its request is whole
            ours.came_through(self._proxies, headers.get_all("X-Forwarded-For"))
            offered = ",".join(headers.get_all("Sec-WebSocket-Protocol"))
            subprotocols = offered.replace(" ", "").split(",")
            given = authorizations(headers.get_all("Authorization"), subprotocols)
            # Several Host headers are none that is served.
            host = ",".join(headers.get_all("Host"))
            await self._admission.prepare(request.path)
            answer = self._admission.answer(request.path, given, ours.peer, host)
        except Exception:
            log.exception("a request failed", extra={"peer": ours.peer, "event": "request_failed"})
            answer = FAILED
        if isinstance(answer, Reply):
            return Response(
                answer.status.value, answer.status.phrase, Headers(answer.headers), answer.content
            )
        ours.caller = answer
        return None

    # ---- websockets

    async def _connection(self, connection: ServerConnection) -> None:
        """Serve one websocket until it ends."""
        _bound_kernel_buffer(connection, self._service.limits.send_buffer_bytes)
        ours = _ours(connection)
        if ours.caller is None:
            raise RuntimeError("a websocket has opened that `_request` has not let in")
        watching = partial(self._admission.watching, ours.caller)
        await converse(self._service, ours, ours.caller.principal, watching)


def _ours(connection: ServerConnection) -> Connection:
    """A connection of the library's as the one of ours that it is."""
    if not isinstance(connection, Connection):
        raise TypeError("connections are made by `create_connection`")
    return connection


def _bound_kernel_buffer(connection: ServerConnection, size: int) -> None:
    """Keep the kernel's send buffer small: a verdict cannot overtake the bytes in it."""
    sock = connection.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
