"""An in-memory connection to this process, with the same limits, fairness and metrics as a socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from cloud_verifier.serving.conversation import converse
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.service import Service
from moa.api.fairness import charged
from moa.errors import CapacityError, RemoteError
from moa.wire import FEATURES, PROTOCOL_VERSIONS, decode_server, encode, remote_error
from moa.wire.messages import ClientMessage, Error, Hello, ServerMessage, Welcome


class Loopback:
    """The client's end of a connection; `converse` has the other one. The queue is bounded by the answer's length."""

    peer = "openai"

    def __init__(self, service: Service) -> None:
        self.meter = Meter(service.limits, service.clock())
        self.flooded: Callable[[str], None] = lambda limit: None
        self.arrived = 0.0
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._why = ""

    # ---- the methods that `converse` uses

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while (frame := await self._up.get()) is not None:
            yield frame

    async def send(self, frame: bytes, /) -> None:
        """To us."""
        self._down.put_nowait(frame)

    async def close(self, code: int, reason: str) -> None:
        """Close both directions."""
        self._why = reason
        self.abort()

    def abort(self) -> None:
        """The same, at once."""
        self._up.put_nowait(None)
        self._down.put_nowait(None)

    # ---- the client's methods

    def put(self, message: ClientMessage) -> None:
        """To the service."""
        self.arrived = time.monotonic()
        self._up.put_nowait(encode(message))

    async def get(self) -> ServerMessage:
        """From the service."""
        frame = await self._down.get()
        if frame is None:
            raise CapacityError(f"the verifier ended the connection: {self._why or 'no reason'}")
        return decode_server(frame)


@contextlib.asynccontextmanager
async def connected(service: Service, principal: str) -> AsyncIterator[Loopback]:
    """A connection of this principal, after hello and welcome, while the body runs."""
    line = Loopback(service)
    task = asyncio.create_task(charged(converse(service, line, principal)))
    try:
        line.put(Hello(versions=list(PROTOCOL_VERSIONS), features=sorted(FEATURES), client="openai"))
        match await line.get():
            case Welcome():
                yield line
            case Error() as error:
                raise remote_error(error)
            case other:
                raise RemoteError("internal", f"the verifier began with {type(other).__name__}")
    finally:
        line.abort()
        await asyncio.gather(task, return_exceptions=True)
