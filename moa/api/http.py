"""HTTP helpers for the routes: bounded bodies, work that is cancelled when its client disconnects,
streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moa.api.errors import ApiError
from moa.api.fairness import charged

Result = TypeVar("Result")
_KEEPALIVE_SECONDS = 15.0
"""Seconds without a frame after which a comment is sent."""
_KEEPALIVE = "still here"
"""What a comment says that keeps the connection alive through proxies."""
SIGN_SECONDS = 1.0
"""The same in a stream with numbers, which can be resumed: its client goes on elsewhere where it hears nothing."""
_PIECE = 2**18
"""Bytes of a JSON response that are sent at once."""
_SEND_SECONDS = 30.0
"""Seconds after which the connection of a client that reads nothing is closed."""


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request; an `ApiError` if it is not called JSON, or is longer than `most`
    bytes, of which no more are read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send JSON, with Content-Type: application/json")
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ApiError(413, f"the body is longer than {most} bytes", code="body_too_long")
        parts.append(part)
    return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine and return its result. If the client disconnects first, the work is cancelled
    and `ClientDisconnect` is raised: nobody would read the result."""
    working = asyncio.ensure_future(charged(work))
    disconnected = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(Response):
    """A JSON response, sent in pieces: log-probabilities of thousands of tokens are megabytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The content as bytes; bytes are JSON already."""
        if isinstance(content, bytes):
            return content
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces; other tasks run in between."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for start in range(0, max(1, len(self.body)), _PIECE):  # one piece of an empty body
            stop = start + _PIECE
            await send(
                {
                    "type": "http.response.body",
                    "body": self.body[start:stop],
                    "more_body": stop < len(self.body),
                }
            )
            await asyncio.sleep(0)


class Comment(str):
    """A remark in a stream, for people who look at it: clients skip it."""

    __slots__ = ()

    def frame(self, *, among_numbers: bool = False) -> bytes:
        """Its bytes. In a stream whose events have numbers (`id:`) no blank line follows: OpenAI's
        package takes any blank line behind a number for the end of an event, whose data is then
        empty, and fails. Elsewhere one follows, for clients that cut at blank lines."""
        end = "\n" if among_numbers else "\n\n"
        return f": {self}{end}".encode()


DONE = "[DONE]"
"""The mark of a stream's end, as OpenAI has it."""


def event_frame(event: Any, id: str = "") -> bytes:
    """The bytes of one server-sent event. An object is sent as JSON, named by its `type` if it has
    one; a text as it is; a `Comment` as a comment. None of these contains a line break, which would
    end the event. Bytes are a frame already, and are returned."""
    if isinstance(event, bytes):
        return event
    if isinstance(event, Comment):
        return event.frame()
    head = f"id: {id}\n" if id else ""
    if isinstance(event, str):
        data = event.encode()
    else:
        data = msgspec.json.encode(event)
        if name := event.get("type"):
            head += f"event: {name}\n"
    return head.encode() + b"data: " + data + b"\n\n"


class _FrameClient:
    """The client of a stream, to which frames are sent."""

    def __init__(self, send: Send, sign_of_life: bytes) -> None:
        self._send = send
        self._sign_of_life = sign_of_life
        self._sent_at = time.monotonic()
        """When the latest frame was sent."""

    async def put(self, frame: bytes, *, more: bool = True) -> None:
        """Send a frame, the last one without `more` to come. A `TimeoutError` for a client that does
        not read it in time."""
        async with asyncio.timeout(_SEND_SECONDS):
            await self._send({"type": "http.response.body", "body": frame, "more_body": more})
        self._sent_at = time.monotonic()

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment after each time of so many seconds without a frame, until cancelled."""
        while True:
            pause = self._sent_at + seconds - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            else:
                await self.put(self._sign_of_life)


class EventStream(Response):
    """Send server-sent events until they end or the client disconnects; then close their
    generator."""

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        headers: dict[str, str],
        *,
        first: Any = None,
        numbered: bool = False,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        """Send `events`, each of which is what `event_frame` takes; `first` is one that was taken
        from them already. With `numbered` they are frames that have numbers, from which a client
        can resume. After some seconds of silence a comment is sent, so that the connection is not
        taken for dead. `left` is called if the client disconnects before the end, or does not read."""
        self._events = events
        self._left = left
        self._first = first
        self._numbered = numbered
        super().__init__(
            None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]  # of the body that a `Response` has
        self.headers["content-type"] = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientDisconnect, TimeoutError, OSError):
            self._left()

    async def _send(self, send: Send) -> None:
        """Send the frames as they come, and a comment as a sign of life after each while without
        any. A client that does not read a frame in time is given up (`TimeoutError`)."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sign_of_life = Comment(_KEEPALIVE).frame(among_numbers=self._numbered)
        client = _FrameClient(send, sign_of_life)
        silence = SIGN_SECONDS if self._numbered else _KEEPALIVE_SECONDS
        keeping_alive = asyncio.create_task(client.keep_alive(silence))
        try:
            async with contextlib.aclosing(self._events) as events:
                if self._first is not None:
                    await client.put(event_frame(self._first))
                async for event in events:
                    await client.put(event_frame(event))
            await client.put(b"", more=False)
        finally:
            keeping_alive.cancel()
