"""A verifier that sends pings and does not read the answers: they do not fill this device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from websockets.utils import accept_key

from edge_client.link.dialling import Dialling
from edge_client.link.retry import Retry
from edge_client.link.websocket import Endpoint, VerifierLink
from moa.wire import PROTOCOL_VERSIONS, encode
from moa.wire.messages import Hello
from tests.torture.fake_verifier import WELCOME
from tests.torture.raw import PATIENCE

HELLO = Hello(list(PROTOCOL_VERSIONS), [])
PING = bytes([0x89, 125]) + b"x" * 125
PONG_BYTES = 2 + 4 + 125
"""Head, mask and payload."""
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def verifier(talk: Talk) -> AsyncIterator[str]:
    """Welcomes each device, and then talks to it byte by byte."""
    accept = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    tasks = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            key = head.split("Sec-WebSocket-Key: ")[1].split("\r\n")[0]
            protocol = head.split("Sec-WebSocket-Protocol: ")[1].split("\r\n")[0]
            said = f"Sec-WebSocket-Accept: {accept_key(key)}\r\nSec-WebSocket-Protocol: {protocol}"
            writer.write(f"{accept}{said}\r\n\r\n".encode())
            await reader.readexactly(2 + 4 + len(encode(HELLO)))
            welcome = encode(WELCOME)
            writer.write(bytes([0x82, 126]) + len(welcome).to_bytes(2, "big") + welcome)
            await talk(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**16)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def link_to(url: str) -> VerifierLink:
    """A link whose own pings end no connection within a test."""
    endpoint = Endpoint(url=url, hello=HELLO, keepalive_seconds=1000.0)
    return VerifierLink(endpoint, Dialling(Retry(0.001, 0.01)))


async def flood(writer: asyncio.StreamWriter) -> None:
    """Send pings and read nothing, until the device reads nothing more either, or hangs up."""
    transport = writer.transport
    transport.pause_reading()  # type: ignore[attr-defined]
    while transport.get_write_buffer_size() < 2**21 and not transport.is_closing():
        writer.write(PING * 500)
        await asyncio.sleep(0)


async def test_pings_of_one_that_does_not_read_are_not_answered_without_end() -> None:
    blocked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await flood(writer)
        blocked.set()
        await asyncio.Event().wait()

    async with verifier(talk) as url, link_to(url).running() as link:
        async with asyncio.timeout(PATIENCE):
            while not blocked.is_set():
                if link._connection is not None:
                    waiting = link._connection.transport.get_write_buffer_size()
                    assert waiting < 2**20, "answers to what was read at once, and no more"
                await asyncio.sleep(0)
        assert link._connection is not None
        assert link._connection.paused
        assert link.connections == 1


async def test_one_that_does_not_read_is_left_when_a_ping_would_be_late() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.transport.is_closing():
            await flood(writer)
            await asyncio.sleep(0)

    async with verifier(talk) as url, link_to(url).running() as link:
        async with asyncio.timeout(PATIENCE):
            while link.connections < 2:
                if link._connection is not None:
                    link._connection.ping_timeout = 0.05
                await asyncio.sleep(0)


async def test_one_that_reads_late_gets_all_answers() -> None:
    answered = asyncio.Event()

    async def pause(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = 0
        while not is_paused():
            writer.write(PING * 500)
            count += 500
            await asyncio.sleep(0)
        await reader.readexactly(PONG_BYTES * count)
        answered.set()
        await reader.read()

    def is_paused() -> bool:
        return link._connection is not None and link._connection.paused

    async with verifier(pause) as url, link_to(url).running() as link:
        async with asyncio.timeout(PATIENCE):
            await answered.wait()
        assert link.up
        assert link.connections == 1
