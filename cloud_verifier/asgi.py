"""The verifier as an ASGI application, for a server that owns the sockets (Ray Serve, uvicorn). No torch.

What a port of our own does with bytes (`connection.py`) is then up to that server; frames are counted here, by the
same budgets, and the conversation is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from websockets.exceptions import ConnectionClosedError

from cloud_verifier.budgets import BYTES, FRAMES, Meter
from cloud_verifier.conversation import converse
from cloud_verifier.door import Door, Reply
from cloud_verifier.logs import log
from cloud_verifier.outbox import HangUp
from cloud_verifier.service import Service
from moa.wire.codes import CloseCode
from moa.wire.limits import Limits
from moa.wire.versions import SUBPROTOCOL

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LONGEST_NAP = 0.25


class AsgiApp:
    """Serves a `Service`; `door` says who may come in."""

    def __init__(self, service: Service, door: Door, origins: tuple[str, ...] = ()) -> None:
        self._service, self._door, self._origins = service, door, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, one websocket, or the life of the server."""
        match scope["type"]:
            case "lifespan":
                await _live(receive, send)
            case "http":
                answer = await self._answer(scope)
                await _reply(answer if isinstance(answer, Reply) else None, send)
            case "websocket":
                await self._websocket(scope, receive, send)

    async def _answer(self, scope: Scope) -> Reply | str:
        query = scope.get("query_string", b"").decode("latin-1")
        # Behind a prefix of the server's own, our paths begin after it.
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        return await self._door.answer(f"{path}?{query}", _fields(scope, b"authorization"), _peer(scope))

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # "websocket.connect"
        answer = await self._answer(scope)
        strange = any(origin not in self._origins for origin in _fields(scope, b"origin"))
        if isinstance(answer, Reply) or strange or SUBPROTOCOL not in scope.get("subprotocols", ()):
            code = CloseCode.TRY_LATER if isinstance(answer, Reply) and answer.status >= 500 else CloseCode.POLICY
            await send({"type": "websocket.close", "code": int(code), "reason": ""})
            return
        await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL, "headers": []})
        await converse(self._service, AsgiSocket(receive, send, self._service.limits, _peer(scope)), answer)


class AsgiSocket:
    """A websocket of an ASGI server, as a conversation wants it."""

    def __init__(self, receive: Receive, send: Send, limits: Limits, peer: str) -> None:
        self._receive, self._send, self._limits, self.peer = receive, send, limits, peer
        self.arrived = time.monotonic()
        self.meter = Meter(limits, self.arrived)
        self.flooded: Callable[[str], None] = lambda limit: None
        self._open = True

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Frames as they come and as the budget allows."""
        while self._open:
            message = await self._receive()
            self.arrived = time.monotonic()
            if message["type"] == "websocket.disconnect":
                self._open = False
                return
            frame: str | bytes = message.get("bytes") or message.get("text") or b""
            if len(frame) > self._limits.max_frame_bytes:
                raise HangUp(CloseCode.TOO_BIG, "max_frame_bytes")
            await self._hold_back()
            self.meter.spend(FRAMES)
            self.meter.spend(BYTES, len(frame))
            yield frame

    async def send(self, frame: bytes, /) -> None:
        """Send a frame; a reader that is too slow ends the connection, where the server tells us of it."""
        if not self._open:
            raise ConnectionClosedError(None, None)
        try:
            async with asyncio.timeout(self._limits.send_timeout):
                await self._send({"type": "websocket.send", "bytes": frame})
        except TimeoutError:
            log.warning("too slow a reader", extra={"peer": self.peer, "event": "slow_reader", "limit": "send_timeout"})
            self._open = False
            raise ConnectionClosedError(None, None) from None

    async def close(self, code: int, reason: str) -> None:
        """End the connection in an orderly way."""
        if self._open:
            self._open = False
            await self._send({"type": "websocket.close", "code": int(code), "reason": reason})

    async def _hold_back(self) -> None:
        while self._open and (wait := self.meter.wait(time.monotonic())) > 0:
            nap = min(wait, _LONGEST_NAP)
            if limit := self.meter.held_back(nap, time.monotonic()):
                self.flooded(limit)
            await asyncio.sleep(nap)


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _reply(reply: Reply | None, send: Send) -> None:
    status, headers, content = 426, {"Upgrade": "websocket"}, b"this is a websocket service\n"
    if reply is not None:
        status, headers, content = reply.status, reply.headers, reply.content
    fields = [(name.lower().encode(), value.encode()) for name, value in headers.items() if name != "Connection"]
    await send({"type": "http.response.start", "status": int(status), "headers": fields})
    await send({"type": "http.response.body", "body": content})


def _fields(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for field, value in scope["headers"] if field.lower() == name]


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""
