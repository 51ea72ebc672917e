"""The verifier as an ASGI application, for servers that own the sockets, as Ray Serve and uvicorn
do. No torch.

The conversation, the answers to plain HTTP and the budgets are those of our own port. What that
port does with bytes and half-open connections (`connection.py`, `half_open.py`) is the server's
here: frames are counted when they are whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from websockets.exceptions import ConnectionClosedError

from cloud_verifier.app import Verifier
from cloud_verifier.logs import log
from cloud_verifier.serving.admission import Admission, Reply, text_reply
from cloud_verifier.serving.auth import Caller, authorizations
from cloud_verifier.serving.conversation import converse
from cloud_verifier.sessions.budgets import BYTES, FRAMES, Meter
from cloud_verifier.sessions.outbox import CloseConnection
from cloud_verifier.sessions.service import Service
from moa.wire.codes import CloseCode
from moa.wire.limits import Limits
from moa.wire.versions import SUBPROTOCOL

AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]

_LONGEST_NAP = 0.25
"""Seconds that a connection over its budget sleeps at once, at most."""
_REPLIES = "websocket.http.response"
"""The extension of servers that can refuse a handshake with any HTTP status, not just 403."""


class AsgiVerifier:
    """A verifier whose engine runs as long as the server does."""

    def __init__(self, verifier: Verifier, origins: Sequence[str] = ()) -> None:
        self._verifier = verifier
        self._service: Service = verifier.service
        self._admission: Admission = verifier.admission
        self._origins = frozenset(origins)

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Serve what the ASGI server calls for: an HTTP request, a websocket, or its own start and
        end."""
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "http":
                answer = self._answer(scope)
                if not isinstance(answer, Reply):  # a websocket might open, and this is none
                    answer = _ONLY_WEBSOCKETS
                await _reply(answer, send, "http.response")
            case "websocket":
                await self._websocket(scope, receive, send)

    async def _live(self, receive: AsgiReceive, send: AsgiSend) -> None:
        """Run the verifier from the server's start to its end."""
        await receive()  # lifespan.startup
        async with self._verifier.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
            await self._verifier.drain()
        await send({"type": "lifespan.shutdown.complete"})

    def _answer(self, scope: AsgiScope) -> Reply | Caller:
        """Returns the answer to a request, or the caller whose websocket may open."""
        mounted_at = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(mounted_at)
        given = authorizations(_values(scope, b"authorization"), scope.get("subprotocols", ()))
        # Several Host headers are none that is served.
        host = ",".join(_values(scope, b"host"))
        return self._admission.answer(path, given, _peer(scope), host)

    async def _websocket(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Serve one websocket until it ends, or refuse its handshake."""
        await receive()  # the request itself
        answer = self._answer(scope)
        if SUBPROTOCOL not in scope.get("subprotocols", ()):
            answer = _OTHER_SUBPROTOCOL
        elif any(origin not in self._origins for origin in _values(scope, b"origin")):
            answer = _OTHER_ORIGIN
        if isinstance(answer, Reply):
            if _REPLIES in (scope.get("extensions") or {}):
                await _reply(answer, send, _REPLIES)
            else:  # this server can only refuse, without a reason
                await send({"type": "websocket.close", "code": CloseCode.POLICY, "reason": ""})
            return
        await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL, "headers": []})
        socket = AsgiSocket(receive, send, self._service.limits, _peer(scope))
        watching = partial(self._admission.watching, answer)
        await converse(self._service, socket, answer.principal, watching)


class AsgiSocket:
    """A websocket of an ASGI server, as `conversation.py` wants it."""

    def __init__(self, receive: AsgiReceive, send: AsgiSend, limits: Limits, peer: str) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self.peer = peer
        self.arrived = time.monotonic()
        self.meter = Meter(limits, self.arrived)
        self.flooded: Callable[[str], None] = lambda limit: None
        self._open = True

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Yield the frames as they come. A connection above its budget is read more slowly; a frame
        that is too large ends it."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                break
            self.arrived = time.monotonic()
            frame: str | bytes = message.get("bytes") or message.get("text") or b""
            if len(frame) > self._limits.max_frame_bytes:
                raise CloseConnection(CloseCode.TOO_BIG, "max_frame_bytes")
            self.meter.spend(FRAMES)
            self.meter.spend(BYTES, len(frame))
            await self._hold_back()
            yield frame
        self._open = False

    async def send(self, frame: bytes, /) -> None:
        """Send a frame; the connection ends if the other end does not read it in time."""
        try:
            async with asyncio.timeout(self._limits.send_timeout):
                await self._send_message({"type": "websocket.send", "bytes": frame})
        except TimeoutError:
            log.warning(
                "too slow a reader",
                extra={"peer": self.peer, "event": "slow_reader", "limit": "send_timeout"},
            )
            self._open = False
            raise ConnectionClosedError(None, None) from None

    async def close(self, code: int, reason: str) -> None:
        """End the connection in an orderly way."""
        if self._open:
            await self._send_message(
                {"type": "websocket.close", "code": int(code), "reason": reason}
            )
            self._open = False

    async def _send_message(self, message: AsgiMessage) -> None:
        """Send a message to the server; an error if the connection is closed."""
        if not self._open:
            raise ConnectionClosedError(None, None)
        try:
            await self._send(message)
        except OSError:  # it has closed meanwhile
            self._open = False
            raise ConnectionClosedError(None, None) from None

    async def _hold_back(self) -> None:
        """Wait until the connection's budget allows the next frame. One that has waited for most of
        some seconds floods: it is ended."""
        while True:
            wait = self.meter.wait(time.monotonic())
            if wait <= 0:
                return
            nap = min(wait, _LONGEST_NAP)
            limit = self.meter.held_back(nap, time.monotonic())
            if limit:
                self.flooded(limit)
                raise CloseConnection(CloseCode.POLICY, limit)
            await asyncio.sleep(nap)


_ONLY_WEBSOCKETS = text_reply(
    HTTPStatus.UPGRADE_REQUIRED, "this port speaks websocket", {"Upgrade": "websocket"}
)
_OTHER_SUBPROTOCOL = text_reply(HTTPStatus.BAD_REQUEST, f"the subprotocol is {SUBPROTOCOL}")
_OTHER_ORIGIN = text_reply(HTTPStatus.FORBIDDEN, "this origin may not connect")


async def _reply(reply: Reply, send: AsgiSend, kind: str) -> None:
    """Send a whole response; `kind` is what the types of its two messages begin with."""
    fields = [
        (name.lower().encode(), value.encode())
        for name, value in reply.headers.items()
        if name != "Connection"  # the server's own business
    ]
    await send({"type": f"{kind}.start", "status": int(reply.status), "headers": fields})
    await send({"type": f"{kind}.body", "body": reply.content})


def _values(scope: AsgiScope, name: bytes) -> list[str]:
    """The values of all header fields of this name."""
    return [value.decode("latin-1") for field, value in scope["headers"] if field.lower() == name]


def _peer(scope: AsgiScope) -> str:
    """The other end's address, for the log."""
    client = scope.get("client")
    if not client:
        return ""
    host, port = client
    return f"{host}:{port}"
