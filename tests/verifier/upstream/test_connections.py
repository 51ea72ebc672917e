"""A connection to an upstream serves one answer after another."""

from __future__ import annotations

import asyncio
import json

from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import Continuation
from moa.sampling import SamplingSettings
from tests.verifier.upstream.scripted import Tasks, closed

ASKED = Continuation(ids=[1], text="a", sampling=SamplingSettings(), most=8)
MODELS = json.dumps({"data": [{"id": "big"}]}).encode()


class Kept:
    """An engine that keeps connections open, and ends its answers with `[DONE]`."""

    connections = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(f"content-length: {len(MODELS)}\r\n\r\n".encode() + MODELS)
                    continue
                body = await reader.readexactly(
                    int(head.partition("content-length:")[2].split()[0])
                )
                if b"prompt" not in body:  # so it is asked whether there is such a route
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
                writer.write(b"transfer-encoding: chunked\r\n\r\n")
                last = json.dumps({"choices": [{"text": "b", "finish_reason": "stop"}]})
                for data in (last, "[DONE]"):
                    event = f"data: {data}\n\n".encode()
                    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                writer.write(b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            await closed(writer)


async def test_answers_share_a_connection() -> None:
    engine = Kept()
    connections = Tasks(engine.carry)
    server = await asyncio.start_server(connections, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    upstreams = Upstreams([address], interface="completions")
    for _ in range(3):
        assert "".join([piece.text async for piece in upstreams.go_on(ASKED)]) == "b"
    assert engine.connections == 1
    await upstreams.close()
    server.close()
    await connections.end()
