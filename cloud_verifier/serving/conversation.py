"""One connection from handshake to end: passes frames to a `Channel`, and its outbox to any kind of
socket.

It needs only the few methods of `Socket`, so that another server can pass its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Protocol

from websockets.exceptions import ConnectionClosed

from cloud_verifier.logs import log
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.channel import Channel
from cloud_verifier.sessions.outbox import CloseConnection, Outbox
from cloud_verifier.sessions.service import Service
from moa.wire.codes import CloseCode

Who = dict[str, object]
"""Peer and principal, for the log."""


class Socket(Protocol):
    """A websocket after its handshake. Sending may raise `ConnectionClosed`."""

    @property
    def peer(self) -> str:
        """The other end's address, for the log."""

    @property
    def arrived(self) -> float:
        """When the latest bytes arrived, by the monotonic clock."""

    def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Frames as they come, until the connection is closed."""

    @property
    def meter(self) -> Meter:
        """Counts the input; the socket passes no frames while the meter says to wait."""

    flooded: Callable[[str], None]
    """The socket calls it with the limit's name when the meter reports a flood."""

    async def send(self, frame: bytes, /) -> None:
        """Send a binary frame; returns when there is room for the next. The socket closes if the
        other end does not read within `send_timeout`."""

    async def close(self, code: int, reason: str) -> None:
        """End the connection in an orderly way."""


Watching = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Makes a context that calls a function if the token that a connection was opened with is revoked
meanwhile."""


def unwatched(_: Callable[[], None]) -> AbstractContextManager[None]:
    """For a connection whose token somebody else watches."""
    return contextlib.nullcontext()


async def converse(
    service: Service,
    socket: Socket,
    principal: str,
    watching: Watching = unwatched,
    *,
    is_local: bool = False,
) -> None:
    """Serve one connection of `principal` until it ends: frames go to a channel, which handles
    them, and what the channel's outbox holds goes out. `is_local`: as in `Outbox`."""
    why = service.refuse_another(principal, socket.peer)
    if why:  # handshakes that were under way together
        await socket.close(CloseCode.TRY_LATER, why)
        return
    who: Who = {"peer": socket.peer, "principal": principal}
    async with _orderly_end(socket, who):
        channel = Channel(service, principal, socket.meter, socket.peer, is_local=is_local)
        async with _writing(channel, socket, who, watching) as writer:
            try:
                async for frame in socket:
                    if not isinstance(frame, bytes):
                        raise CloseConnection(CloseCode.BAD_DATA, "frames are binary")
                    await channel.receive(frame, socket.arrived)
                    # Between frames that arrived together, other connections get their turn.
                    await asyncio.sleep(0)
            except CloseConnection as end:
                channel.outbox.end(end)
                await writer


@contextlib.asynccontextmanager
async def _writing(
    channel: Channel, socket: Socket, who: Who, watching: Watching
) -> AsyncIterator[asyncio.Task[None]]:
    """A context in which what the channel has to say is written to its socket; yields the task that
    does so. Beside it, the connection ends if no hello comes in time. At the end of the context the
    channel is closed."""
    service = channel.service
    started = service.clock()
    tasks: list[asyncio.Task[None]] = []
    try:
        log.info("connected", extra=who | {"event": "connected"})
        socket.meter.belongs_to(service.principal(channel.principal))
        socket.flooded = channel.flooded
        tasks.append(asyncio.create_task(_await_hello(socket, channel)))
        writer = asyncio.create_task(_write(socket, channel.outbox, who))
        tasks.append(writer)
        with watching(channel.revoked):
            yield writer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel.close()
        seconds = round(service.clock() - started, 3)
        log.info("disconnected", extra=who | {"event": "disconnected", "seconds": seconds})


async def _write(socket: Socket, outbox: Outbox, who: Who) -> None:
    """Send what is in the outbox, until it or the connection ends."""
    try:
        async with _orderly_end(socket, who):
            await outbox.write(socket.send)
    finally:
        outbox.end(CloseConnection(CloseCode.NORMAL, "the connection is gone"))


@contextlib.asynccontextmanager
async def _orderly_end(socket: Socket, who: Who) -> AsyncIterator[None]:
    """A context whose end, whatever the reason, is told to the other end of the connection by a
    close code."""
    try:
        yield
    except ConnectionClosed:
        pass  # it has ended already
    except CloseConnection as end:
        log.info("hung up: %s", end, extra=who | {"event": "hang_up"})
        await socket.close(end.code, end.reason)
    except Exception:
        log.exception("a connection failed", extra=who | {"event": "connection_failed"})
        await socket.close(CloseCode.INTERNAL, "internal error")


async def _await_hello(socket: Socket, channel: Channel) -> None:
    """End a connection that does not begin with a hello in time."""
    try:
        async with asyncio.timeout(channel.service.limits.hello_timeout):
            await channel.welcomed.wait()
    except TimeoutError:
        await socket.close(CloseCode.PROTOCOL_ERROR, "no hello")
