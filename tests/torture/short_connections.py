"""A link on which every connection is cut after so many bytes received, whatever is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_FEWEST, _MOST = 500, 7000
"""Bytes from the verifier, the handshake included."""


@dataclass
class ShortConnections:
    """A proxy before a port of this machine."""

    to: int
    rng: random.Random
    port: int = 0
    cuts: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ShortConnections]:
        """Listen while the body runs."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.transport.abort()
            return
        down = asyncio.create_task(self._down(there[0], writer, self.rng.randint(_FEWEST, _MOST)))
        up = asyncio.create_task(_up(reader, there[1]))
        self._tasks |= {down, up}
        await asyncio.wait({down, up}, return_when=asyncio.FIRST_COMPLETED)
        for task in (down, up):
            task.cancel()
            self._tasks.discard(task)
        for end in (writer, there[1]):
            end.transport.abort()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
        with contextlib.suppress(OSError):
            while left and (data := await reader.read(left)):
                left -= len(data)
                writer.write(data)
                await writer.drain()
        if not left:
            self.cuts += 1


async def _up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
