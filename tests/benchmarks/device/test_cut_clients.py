"""The client of llama.cpp's replay, which stands for the server's own page."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

from benchmarks.device.cut_clients import replay

TEXT = ["Ada ", "meets ", "a fox ", "in a café ", "nearby."]


def chunk(text: str) -> str:
    """A chunk of a streamed chat, as JSON."""
    return json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)


BODY = "".join(
    [
        *(f"data: {chunk(piece)}\n\n" for piece in TEXT),
        "data: [DONE]\n\n",
    ]
).encode()


@contextlib.asynccontextmanager
async def keeps_what_it_wrote(breaks_at: list[int]) -> AsyncIterator[tuple[str, list[int]]]:
    """A server of the replay's interface whose connections break off at these bytes of the answer;
    its address, and from where the rest was asked for."""
    asked_from: list[int] = []
    named: set[str] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        target = urlsplit(head.split()[1])
        start = 0
        if head.startswith("POST /v1/chat/completions "):
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            named.add(headers["x-conversation-id"])
        else:
            asked = parse_qs(target.query)
            assert target.path == "/v1/stream"
            assert asked["conv_id"][0] in named
            start = int(asked["from"][0])
            asked_from.append(start)
        stop = breaks_at.pop(0) if breaks_at else len(BODY)
        sent = BODY[start:stop]
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"content-length: %d\r\n\r\n" % (len(BODY) - start)
        )
        writer.write(sent)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked_from


async def test_the_rest_is_asked_for_from_the_byte_behind_the_last_one() -> None:
    inside_a_character = BODY.index("é".encode()) + 1
    breaks = [40, inside_a_character]
    async with keeps_what_it_wrote(list(breaks)) as (url, asked_from):
        case = {
            "id": 1,
            "url": url,
            "model": "any",
            "prompt": "Tell me a story.",
            "temperature": 0.0,
            "seed": 0,
            "tokens": 32,
        }
        pieces = [piece async for piece in replay(case)]
    assert pieces == TEXT
    assert asked_from == breaks
