"""An engine that writes at a fixed pace, in its own process: what stands in front of it is measured
without a model that would share the machine's cores."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from moa.errors import MoaError

_MODELS = {"data": [{"id": "paced", "owned_by": "nobody"}]}
WORDS = ("so", "it", "was", "on", "with", "one", "word", "more", "at", "this", "step", "home")
"""Each of them is one token of the embedded bundle: an answer of so many tokens is the same text,
whoever counts them."""


@contextlib.contextmanager
def paced_engine(*, first_ms: float, token_ms: float) -> Iterator[str]:
    """Its address, for as long as the context lasts. Chats: the first word comes after `first_ms`,
    each other one after `token_ms` more."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kit.paced_engine", str(first_ms), str(token_ms)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise MoaError("the paced engine did not start")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.communicate()


class _Engine:
    def __init__(self, first_ms: float, token_ms: float) -> None:
        self._first = first_ms / 1000
        self._token = token_ms / 1000

    async def serve(self) -> None:
        """Print the port, then serve for ever."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, which is kept alive as those of an engine are."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await self._request(reader, writer)
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = 0
        for line in head.split("\r\n"):
            if line.startswith("content-length:"):
                size = int(line.partition(":")[2])
        body = await reader.readexactly(size)
        if head.startswith("get"):
            content = json.dumps(_MODELS).encode()
            length = f"content-length: {len(content)}\r\n\r\n".encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length + content
            )
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        await self._words(writer, json.loads(body)["max_tokens"])
        await _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _words(self, writer: asyncio.StreamWriter, count: int) -> None:
        """By the clock of the whole answer, so that a late word does not make the others late."""
        began = asyncio.get_running_loop().time()
        for number in range(count):
            due = began + self._first + number * self._token
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            word = WORDS[number % len(WORDS)]
            delta = {"content": word if number == 0 else f" {word}"}
            reason = "length" if number == count - 1 else None
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            await _event(writer, json.dumps(chunk))


async def _event(writer: asyncio.StreamWriter, data: str) -> None:
    content = f"data: {data}\n\n".encode()
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
    await writer.drain()


if __name__ == "__main__":
    asyncio.run(_Engine(float(sys.argv[1]), float(sys.argv[2])).serve())
