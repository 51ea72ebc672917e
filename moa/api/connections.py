"""The HTTP server: its connections are bounded in number, and in time until a request is there and
between requests.

Anybody can connect and send nothing, or a byte now and then, or never read. So a connection has a
limit of time for a whole head, for a whole body and for the next request, and is counted as
half-open meanwhile (`HalfOpen`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moa.api.fairness import Fairness
from moa.api.guard import Guard
from moa.api.metrics import ApiMetrics
from moa.process.half_open import HalfOpen, room_for_connections
from moa.process.listening import Port
from moa.process.rare_lines import RareLines
from moa.process.secured import Secured, TlsFailure
from moa.token_bucket import TokenBucket

log = logging.getLogger("moa.api")

_HEAD_SECONDS = 10.0
"""Seconds for a whole head, from the beginning of the connection."""
_BODY_SECONDS = 30.0
"""Seconds for a whole body."""
_IDLE_SECONDS = 30.0
"""Seconds until the next request."""
_MOST = 1024
"""Connections at once."""
_MOST_WAITING = 256
"""Connections that wait for a request at once."""
_FAILURES = {
    "no_tls": "plain bytes on a port with TLS: its address is https://",
    "tls": "a TLS handshake failed",
    "no_request": "what came is no HTTP request (TLS on a port without it looks so, too)",
}
"""What is logged of each kind of a connection that brings no request."""
_LINES_PER_SECOND = 0.1
"""Log lines about connections that were dropped."""
_BACKLOG = 64
"""Connections that the system holds for us; and that are accepted at once: more would delay all
others."""
_ENDING_SECONDS = 2.0
"""For so long a server that stops waits for answers."""
_STARTING_SECONDS = 0.005
"""Seconds between two looks at whether the server has started."""


class Connections:
    """The connections of one server. Those that wait for a request give way to new ones."""

    def __init__(self, fairness: Fairness, metrics: ApiMetrics, ports: int) -> None:
        """Begin without connections. `ports` is how many ports share the process's file
        descriptors, which bound their number."""
        self.fairness = fairness
        self._failed = metrics.failed_connections
        self._failures = RareLines(log)
        self.most, waiting = room_for_connections(_MOST, _MOST_WAITING, ports=ports)
        self.waiting = HalfOpen(waiting, self._dropped)
        self.open: set[HttpConnection] = set()
        self._lines = TokenBucket(_LINES_PER_SECOND, 3.0, time.monotonic())

    def __contains__(self, connection: object) -> bool:
        """Whether this one waits for a request."""
        return connection in self.waiting

    def enter(self, connection: HttpConnection) -> None:
        """Count another connection; if there are too many, one that waits for a request is ended."""
        self.open.add(connection)
        self.waiting.enter(connection)
        if len(self.open) > self.most:
            self.waiting.make_room()

    def leave(self, connection: HttpConnection) -> None:
        """Forget a connection that is gone."""
        self.open.discard(connection)
        self.waiting.leave(connection)

    def exhausted(self, peer: str) -> None:
        """Make room after a connection was refused for lack of file descriptors."""
        self._dropped(peer, 0)
        self.waiting.make_room()

    def failed(self, peer: str, kind: str, why: str = "") -> None:
        """Count a connection that brought no request, and log one of its kind now and then."""
        self._failed.labels(kind).inc()
        words = f"{_FAILURES[kind]} ({why})" if why else _FAILURES[kind]
        self._failures.warn(kind, words, peer, "failed_connection", kind=kind)

    def _dropped(self, peer: str, count: int) -> None:
        """Log that a connection of an address, which has `count` of them, was dropped; not every
        time, for a flood of them must not fill the log."""
        if self._lines.take(1, time.monotonic()):
            log.warning(
                "too many idle connections: the oldest of an address is dropped, it has %d",
                count,
                extra={"peer": peer, "event": "half_open"},
            )


class HttpConnection(H11Protocol):
    """A connection with limits of time while it has no whole request."""

    _connections: Connections
    """Set by a subclass: the library creates the connections."""
    _phase = ""
    """What it waits for: "head", "body", "idle" (the next request), or "answer"."""
    _deadline: asyncio.TimerHandle | None = None
    """Ends the connection when its time for this phase is over."""

    @property
    def peer(self) -> str:
        """The other end's address."""
        address = self.transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""

    def abort(self) -> None:
        """End it at once."""
        self.transport.abort()

    # ---- asyncio's and the library's callbacks

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head: the connection is established."""
        super().connection_made(transport)
        self.app_state = {
            **self.app_state,
            "abort": self.abort,
            "is_gone": self.transport.is_closing,
        }
        self._wait("head", _HEAD_SECONDS)
        self._connections.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection: it is gone."""
        self._cancel_deadline()
        self._connections.leave(self)
        super().connection_lost(error)

    def handle_events(self) -> None:
        """Read what has arrived; then something else may be missing."""
        super().handle_events()
        self._update_phase()

    def on_response_complete(self) -> None:
        """Wait for the next request: a response was written."""
        super().on_response_complete()
        self._update_phase()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; the later, the more of these there were."""
        self._connections.failed(self.peer, "no_request")
        self.transport.pause_reading()
        refusal = self.loop.create_task(self._refuse(msg))
        self.tasks.add(refusal)  # a task that nobody refers to may be collected
        refusal.add_done_callback(self.tasks.discard)

    async def _refuse(self, message: str) -> None:
        """Refuse what is no request, when the address has had its turn."""
        if not await self._connections.fairness.hold(self.peer.rpartition(":")[0]):
            self.abort()
        elif not self.transport.is_closing():
            super().send_400_response(message)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # anybody can ask for one, as often as they like

    # ---- what it waits for

    def _update_phase(self) -> None:
        """Set the limit of time for what the connection waits for now: the next request, the rest
        of a body, or, without a limit, our own answer."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or self.transport.is_closing():
            return  # the head is still missing, or the connection is over
        if cycle.response_complete:
            self._wait("idle", _IDLE_SECONDS)
        elif cycle.more_body:
            self._wait("body", _BODY_SECONDS)
        else:
            self._phase = "answer"
            self._cancel_deadline()
            self._connections.waiting.leave(self)

    def _wait(self, phase: str, seconds: float) -> None:
        """End the connection in so many seconds, unless it is in another phase by then. If it is in
        this one already, its time goes on: a byte now and then does not prolong it."""
        if phase == self._phase:
            return
        self._phase = phase
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self.abort)
        if phase == "idle":
            self._connections.waiting.enter(self)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class SecuredHttpConnection(Secured, HttpConnection):
    """An `HttpConnection` behind TLS."""

    _handshake_seconds = _HEAD_SECONDS
    _most_of_a_stranger = 256
    """More than of a websocket's port: a body may come in pieces."""

    def unsecured(self, failure: TlsFailure) -> None:
        """Take notice of a TLS handshake that has failed."""
        self._connections.failed(self.peer, failure.kind, failure.reason)

    def _update_phase(self) -> None:
        """Also count the small records of the next request anew, once this one is whole."""
        super()._update_phase()
        if self._phase == "answer":
            self._of_a_stranger = 0


def connection_class(connections: Connections, tls: ssl.SSLContext | None) -> type[HttpConnection]:
    """The class of one server's connections."""
    if tls is None:
        return type("BoundedHttpConnection", (HttpConnection,), {"_connections": connections})
    parts = {"_connections": connections, "_half_open": connections, "_tls": tls}
    return type("BoundedHttpConnection", (SecuredHttpConnection,), parts)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The program that contains this server handles signals."""
        yield


@contextlib.asynccontextmanager
async def serving(
    app: Guard, port: Port, *, tls: ssl.SSLContext | None = None, ports: int = 1
) -> AsyncIterator[str]:
    """Serve an application on `port` while the body runs; yields its address. The process has
    `ports` ports in all, which share its file descriptors."""
    connections = Connections(app.fairness, app.metrics, ports)
    config = uvicorn.Config(
        app,
        http=connection_class(connections, tls),
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",  # warnings are about what strangers send
        server_header=False,
        timeout_keep_alive=30,
        # Longer than we wait ourselves: what it then cancels it logs with a traceback.
        timeout_graceful_shutdown=math.ceil(_ENDING_SECONDS) + 8,
        backlog=_BACKLOG,
    )
    server = _Server(config)
    listening = port.listen(_BACKLOG, connections.exhausted)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not task.done():  # the library offers no event for it
            await asyncio.sleep(_STARTING_SECONDS)
        if task.done():
            task.result()  # raises what has ended it
        yield port.url("https" if tls is not None else "http")
    finally:
        connections.waiting.close()
        server.should_exit = True
        await _end(server, task)


async def _end(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """Wait for a server that stops, and for its answers; those that take too long are told so."""
    await asyncio.wait({task}, timeout=_ENDING_SECONDS)
    requests = list(server.server_state.tasks)
    if requests:
        log.warning(
            "this server stops: requests that were ended before their answers were complete: %d",
            len(requests),
            extra={"event": "ended"},
        )
    for request in requests:
        request.cancel()
    await asyncio.gather(task, return_exceptions=True)
