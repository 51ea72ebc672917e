"""The emulated link delays, throttles, stalls and cuts as configured: over real sockets, in virtual
time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from edge_client.tools.emulated_network import PROFILES, Condition, LinkProxy, Profile


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where no socket is ready, the next timer is due at once: what is sent over loopback is there
    at once."""

    def __init__(self) -> None:
        super().__init__(selector := selectors.DefaultSelector())
        self.now = 0.0
        wait = selector.select

        def select(timeout: float | None = None) -> list[Any]:
            ready = wait(0 if timeout else timeout)
            self.now += 0.0 if ready or not timeout else timeout
            return ready

        selector.select = select  # type: ignore[method-assign, assignment]

    def time(self) -> float:
        return self.now


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**case: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**case))

    return run


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[int]:
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def linked(
    condition: Condition,
) -> AsyncIterator[tuple[LinkProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with echo() as port, LinkProxy("127.0.0.1", port, Profile(((0.0, condition),))) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        try:
            yield link, reader, writer
        finally:
            writer.transport.abort()


async def round_trip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = b"ping"
) -> float:
    time = asyncio.get_running_loop().time
    start = time()
    writer.write(data)
    await asyncio.wait_for(reader.readexactly(len(data)), 5)
    return time() - start


@virtual
async def test_bytes_arrive_unchanged_and_in_order() -> None:
    data = bytes(range(256)) * 2000
    async with linked(Condition(rtt_ms=2, jitter=1.0, loss=0.05)) as (link, reader, writer):
        writer.write(data)
        assert await asyncio.wait_for(reader.readexactly(len(data)), 10) == data
        assert link.passed == {"up": len(data), "down": len(data)}


@virtual
async def test_a_reset_at_the_far_end_is_an_end_at_the_near_one() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # more is unread, so that closing resets
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.close()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server, LinkProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"ping")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(4), 5) == b""
        writer.transport.abort()


@pytest.mark.parametrize(
    ("condition", "size", "first", "second"),
    [
        (Condition(rtt_ms=40, jitter=0), 4, 0.08, 0.04),
        (Condition(up_mbps=1.0), 25_000, 0.2, 0.2),
        (Condition(rtt_ms=20, jitter=0, loss=0.999), 4, 0.12, 0.1),
    ],
    ids=[
        "the first round trip twice the rtt",
        "25 kB at 1 Mbit/s",
        "a loss is a stall of 40 ms each way",
    ],
)
@virtual
async def test_a_round_trip_takes(
    condition: Condition, size: int, first: float, second: float
) -> None:
    async with linked(condition) as (_, reader, writer):
        assert await round_trip(reader, writer, b"x" * size) == pytest.approx(first)
        assert await round_trip(reader, writer, b"x" * size) == pytest.approx(second)


@virtual
async def test_a_cut_comes_at_its_byte() -> None:
    async with linked(Condition()) as (link, reader, writer):
        link.cut_after(10, "down")
        writer.write(b"0123456789abcdef")
        assert await asyncio.wait_for(reader.read(), 5) == b"0123456789"
        second, writer2 = await asyncio.open_connection("127.0.0.1", link.port)
        assert await round_trip(second, writer2) < 1
        writer2.transport.abort()


@virtual
async def test_silence_tells_nobody_and_restore_resets() -> None:
    async with linked(Condition()) as (link, reader, writer):
        await round_trip(reader, writer)
        link.go_silent()
        writer.write(b"lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(4), 0.1)
        link.restore()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(4), 5) == b""


@virtual
async def test_down_refuses_until_restored() -> None:
    async with linked(Condition()) as (link, reader, writer):
        await round_trip(reader, writer)
        link.go_down()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(4), 5) == b""
        with contextlib.suppress(ConnectionError):
            again, writer2 = await asyncio.open_connection("127.0.0.1", link.port)
            writer2.write(b"ping")
            assert await asyncio.wait_for(again.read(4), 5) == b""
            writer2.transport.abort()
        link.restore()
        again, writer2 = await asyncio.open_connection("127.0.0.1", link.port)
        assert await round_trip(again, writer2) < 1
        writer2.transport.abort()


@virtual
async def test_a_connection_that_is_being_made_goes_down_with_the_link() -> None:
    async with linked(Condition(rtt_ms=200)) as (link, reader, writer):
        await asyncio.sleep(0.1)
        link.go_down()
        writer.write(b"ping")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(4), 5) == b""


@virtual
async def test_an_outage_holds_bytes_and_then_delivers_them() -> None:
    up = Condition()
    async with linked(replace(up, out=True)) as (link, reader, writer):
        writer.write(b"ping")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(4), 0.1)
        link.use(PROFILES["loopback"])
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"ping"


def test_a_profile_changes_with_time_as_it_says_and_repeats() -> None:
    bursty = PROFILES["bursty"]
    wifi = PROFILES["wifi"]
    outage = PROFILES["outage"]
    assert [bursty.at(t).rtt_ms for t in (0, 7.9, 8.1, 9.9, 10.1, 18.5)] == [
        40,
        40,
        250,
        250,
        40,
        250,
    ]
    assert [outage.at(t).out for t in (0, 9.9, 10.1, 14.9, 15.1)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert wifi.at(0) == wifi.at(12345.6)
    assert replace(outage.at(12), out=False) == outage.at(0) == PROFILES["4g"].at(0)
