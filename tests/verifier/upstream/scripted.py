"""An upstream that writes whatever bytes a test wants, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cloud_verifier.upstream.engine import UpstreamEngine
from edge_client import Done, EdgeClient, Link, Notice

MODELS = {"data": [{"id": "big", "owned_by": "somebody"}]}


@dataclass
class Request:
    """What was asked."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Upstream:
    """A server that answers `GET /v1/models` with `models` and everything else with `answer`. A
    request of OpenAI's without a prompt is refused, and is not among those that were `asked`."""

    answer: Answer
    models: Answer | None = None
    routes: Collection[str] | None = None
    """Those that there are, below /v1; None: all."""
    unlocked: bool = True
    """Whether it answers without a key more than its models."""
    asked: list[Request] = field(default_factory=list)
    missed: list[Request] = field(default_factory=list)
    """Requests at routes that there are not."""
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; it is closed after its answer."""
        try:
            request = await _read(reader)
            if request.path.endswith("/models") and self.models is None:
                await whole(MODELS)(request, writer)
            elif request.path.endswith("/models"):
                assert self.models is not None
                await self.models(request, writer)
            elif not self.unlocked:
                await whole({"error": {"message": "no key"}}, "401 Unauthorized")(request, writer)
            elif self.routes is not None and request.path.removeprefix("/v1/") not in self.routes:
                self.missed.append(request)
                await whole("no such page", "404 Not Found", "text/html")(request, writer)
            elif request.path.endswith("completions") and not {"prompt", "messages"} & set(
                request.body
            ):
                await whole({"error": {"message": "no prompt"}}, "400 Bad Request")(request, writer)
            else:
                self.asked.append(request)
                await self.answer(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            await closed(writer)


class Job:
    """A job as far as it is looked at."""

    cancelled = False


def engine_and_turn(
    upstreams: Any, job: Job, clock: Callable[[], float] = time.monotonic
) -> tuple[UpstreamEngine, Any]:
    """An engine in front of these, and a turn of it, of which only the job is real: to ask them
    without a session."""
    nothing: Any = None
    spending: Any = SimpleNamespace(
        check=lambda: None, request=lambda tokens: None, limited=False, is_over=False
    )
    engine = UpstreamEngine(
        upstreams,
        encode=nothing,
        decode=nothing,
        prompt=nothing,
        eos_ids=(),
        post=nothing,
        most_running=1,
        most_guesses=1,
        spending=spending,
        clock=clock,
    )
    return engine, SimpleNamespace(job=job, by_rule=False, usages=[])


async def end_of(device: EdgeClient) -> tuple[Done, str]:
    """Have the device answer a question: the end of the answer, and what was said beside it."""
    said = ""
    async for event in device.generate("What is 17 plus 25?"):
        match event:
            case Notice(message=message):
                said += message
            case Link(detail=detail):
                said += detail
            case Done():
                return event, said
    raise AssertionError("no end")


async def closed(*writers: asyncio.StreamWriter) -> None:
    """Close connections, and wait until that has happened: a test must leave none behind."""
    for writer in writers:
        writer.close()
    for writer in writers:
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Tasks:
    """Connections of a server under way: `start_server` does not keep them."""

    def __init__(self, serve: Callable[..., Awaitable[None]]) -> None:
        self._serve = serve
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._running.discard(task)

    async def end(self) -> None:
        """Cancel those that still run, and wait for their ends."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextlib.asynccontextmanager
async def running(answer: Answer, models: Answer | None = None) -> AsyncIterator[Upstream]:
    """Serve while the body runs."""
    upstream = Upstream(answer, models)
    connections = Tasks(upstream.handle)
    server = await asyncio.start_server(connections, "127.0.0.1", 0)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield upstream
    finally:
        server.close()
        await connections.end()


def whole(body: Any, status: str = "200 OK", kind: str = "application/json", *more: str) -> Answer:
    """An answer in one piece: JSON, or text as it is."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        head = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(content)}"]
        head += ["connection: close", *more, "", ""]
        writer.write("\r\n".join(head).encode() + content)
        await writer.drain()

    return answer


def stream(
    *parts: bytes | str | float | dict[str, Any],
    kind: str = "text/event-stream",
    length: int | None = None,
) -> Answer:
    """A stream: objects are written as events, texts and bytes as they are, numbers are pauses."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        more = "" if length is None else f"content-length: {length}\r\n"
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n"
        writer.write(head.encode())
        for part in parts:
            if isinstance(part, float):
                await writer.drain()
                await asyncio.sleep(part)
            elif isinstance(part, dict):
                writer.write(f"data: {json.dumps(part)}\n\n".encode())
            else:
                writer.write(part.encode() if isinstance(part, str) else part)
        await writer.drain()

    return answer


def chunk(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


async def reset(request: Request, writer: asyncio.StreamWriter) -> None:
    """The connection is reset in the middle of the answer's head."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-")
    await writer.drain()
    writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(first.split(" ")[1], headers, json.loads(body) if body else {})


async def up(device: EdgeClient) -> None:
    """Wait for the verifier, whatever the engine behind it does."""
    assert device.link is not None
    await device.link.wait_up(60)
