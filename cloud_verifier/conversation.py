"""One connection from handshake to end: frames in to a `Channel`, its outbox out. Whose socket it is does not matter.

The port of `cloud-verifier serve` and a Ray Serve replica (`ray_serve.py`) both speak through here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from websockets.exceptions import ConnectionClosed

from cloud_verifier.channel import Channel
from cloud_verifier.logs import log
from cloud_verifier.outbox import HangUp
from cloud_verifier.service import Service
from moa.wire.codes import CloseCode


class Socket(Protocol):
    """A websocket behind its handshake. All but `abort` may raise `ConnectionClosed`."""

    @property
    def peer(self) -> str:
        """The other end's address, for the log."""

    @property
    def arrived(self) -> float:
        """When the latest bytes came in, by the monotonic clock."""

    def __aiter__(self) -> AsyncIterator[str | bytes]:
        """Frames as they come, until the connection is closed."""

    async def send(self, frame: bytes, /) -> None:
        """Send a binary frame; returns when there is room for the next."""

    async def close(self, code: int, reason: str) -> None:
        """End the connection in an orderly way."""

    def abort(self) -> None:
        """End it at once."""


async def converse(service: Service, socket: Socket, principal: str) -> None:
    """Serve one connection of `principal` until it ends."""
    if service.full(principal):  # handshakes that were under way together
        await socket.close(CloseCode.TRY_LATER, "too many connections")
        return
    channel = Channel(service, principal, socket.peer)
    writer = asyncio.create_task(_write(socket, channel))
    greeting = asyncio.create_task(_await_hello(socket, channel))
    try:
        async for frame in socket:
            if not isinstance(frame, bytes):
                raise HangUp(CloseCode.BAD_DATA, "frames are binary")
            await channel.receive(frame, socket.arrived)
    except HangUp as end:
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(service.limits.send_timeout):
                await _flush(socket, channel)
        await socket.close(end.code, end.reason)
    except ConnectionClosed:
        pass
    except Exception:
        log.exception("a connection failed", extra={"peer": channel.peer, "event": "connection_failed"})
        await socket.close(CloseCode.INTERNAL, "internal error")
    finally:
        greeting.cancel()
        writer.cancel()
        channel.close()


async def _write(socket: Socket, channel: Channel) -> None:
    outbox = channel.outbox
    try:
        while True:
            outbox.wake.clear()
            frame, pause, spent = outbox.next(channel.sessions.values())
            if frame is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await outbox.wake.wait()
                continue
            async with asyncio.timeout(channel.service.limits.send_timeout):
                await socket.send(frame)
            outbox.sent(spent)
    except ConnectionClosed:
        pass
    except TimeoutError:
        log.warning("too slow a reader", extra={"peer": channel.peer, "event": "slow_reader"})
        socket.abort()
    except HangUp as end:
        log.warning("hung up: %s", end, extra={"peer": channel.peer, "event": "hang_up"})
        await socket.close(end.code, end.reason)
    except Exception:
        log.exception("a connection failed", extra={"peer": channel.peer, "event": "connection_failed"})
        await socket.close(CloseCode.INTERNAL, "internal error")


async def _flush(socket: Socket, channel: Channel) -> None:
    while channel.outbox.has_answers:
        out = channel.outbox.next(channel.sessions.values())
        if out.frame is not None:
            await socket.send(out.frame)


async def _await_hello(socket: Socket, channel: Channel) -> None:
    try:
        async with asyncio.timeout(channel.service.limits.hello_timeout):
            await channel.welcomed.wait()
    except TimeoutError:
        await socket.close(CloseCode.PROTOCOL_ERROR, "no hello")
