"""The link that loses connections, without a verifier behind it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from time import perf_counter

from testing.devices import Script, ScriptedDevice
from tests.torture.kills import _HALF_OPEN, _LEFT_ALONE_AFTER, Link, starved


async def test_ends_that_only_the_verifier_takes_for_alive_are_bounded() -> None:
    """Every further one resets the oldest, and leaves no socket to the garbage collection: its
    warning would be an error here."""
    ended = asyncio.Queue[int]()

    async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = (await reader.readexactly(1))[0]
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        ended.put_nowait(number)
        writer.close()

    server = await asyncio.start_server(wait_for_end, "127.0.0.1", 0)
    async with asyncio.timeout(60), server:
        async with Link(server.sockets[0].getsockname()[1], random.Random(0)) as link:
            for number in range(_HALF_OPEN + 2):
                reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
                writer.write(bytes([number]))
                while link.passed["up"] <= number:
                    await asyncio.sleep(0)
                link._leave()
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b"", "its own end is gone"
                writer.close()
            assert [await ended.get(), await ended.get()] == [0, 1]
            assert ended.empty()
        assert {await ended.get() for _ in range(_HALF_OPEN)} == set(range(2, 2 + _HALF_OPEN))


def test_a_device_that_a_busy_machine_starves_is_left_alone() -> None:
    """Else a verifier that starts slowly is killed before it has told anything, again and again."""
    script = Script.along([5, 6, 7], [8, 9], [8, 9], 2)
    devices = [ScriptedDevice("ws://nowhere", script) for _ in range(2)]
    assert not starved(devices)
    devices[1]._lost_at = perf_counter() - _LEFT_ALONE_AFTER / 2
    assert not starved(devices)
    devices[1]._lost_at = perf_counter() - 2 * _LEFT_ALONE_AFTER
    assert starved(devices)
