"""A raw websocket client for protocol violations: any frames, as many as the socket takes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

from moa.wire import FEATURES, PROTOCOL_VERSIONS, SUBPROTOCOL, Refusal, decode_server, encode
from moa.wire.messages import Error, Hello, Message, ServerMessage

BINARY = 2
TEXT = 1
CLOSE = 8
PING = 9
PONG = 10
PATIENCE = 60.0  # seconds; much longer than anything takes, so that only a hang reaches it


def frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    """A masked frame; its key is zero, so the payload stays readable."""
    first = (0x80 if final else 0) | opcode
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 2**16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + bytes(4) + payload


def binary(message: Message) -> bytes:
    """The frame of a message."""
    return frame(BINARY, encode(message))


def request(token: str = "", *, path: str = "/", extra: Sequence[str] = ()) -> bytes:
    """An opening handshake."""
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
        f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        *([f"Authorization: Bearer {token}"] if token else []),
        *extra,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.limits: list[str] = []
        """Limits that the other end has named."""
        self.closed: tuple[int, str] | None = None
        """The close frame that it sent: code and reason."""
        self.welcome: ServerMessage | None = None
        """The answer to its hello."""

    @classmethod
    async def connect(cls, port: int) -> Raw:
        """A TCP connection, and nothing said yet."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**16))

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, running: Any, token: str = "") -> AsyncIterator[Raw]:
        """A welcomed connection to a verifier of this process, for as long as the context lasts."""
        made = await cls.greeted(running.transport.port, token)
        try:
            yield made
        finally:
            await made.gone()

    async def gone(self) -> None:
        """Abort, and wait until the socket is closed."""
        self.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    @classmethod
    async def greeted(cls, port: int, token: str = "", **hello: Any) -> Raw:
        """A connection that has been welcomed."""
        made = await cls.connect(port)
        try:
            status = await made.shake(token)
            if status != 101:
                raise ConnectionError(f"HTTP {status}")
            made.write(
                binary(
                    Hello(
                        **(
                            {"versions": list(PROTOCOL_VERSIONS), "features": sorted(FEATURES)}
                            | hello
                        )
                    )
                )
            )
            made.welcome = await made.message()
        except BaseException:
            await made.gone()
            raise
        return made

    async def shake(self, token: str = "", **how: Any) -> int:
        """The opening handshake; the status of the answer."""
        self.write(request(token, **how))
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])

    def write(self, data: bytes) -> None:
        """Send, without waiting."""
        self.writer.write(data)

    async def pour(self, data: bytes) -> None:
        """Send, and wait until the socket has taken most of it."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: opcode and payload. A `ConnectionError` when there will be none."""
        try:
            first, size = await self.reader.readexactly(2)
            if size == 126:
                (size,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
            payload = await self.reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionError("the connection is gone") from None
        if first & 15 == CLOSE and len(payload) >= 2:
            self.closed = struct.unpack("!H", payload[:2])[0], payload[2:].decode()
        return first & 15, payload

    async def message(self) -> ServerMessage:
        """The next message of the protocol; pings are answered on the way."""
        async with asyncio.timeout(PATIENCE):
            while True:
                opcode, payload = await self.receive()
                if opcode == PING:
                    self.write(frame(PONG, payload))
                elif opcode == BINARY:
                    return self._noted(decode_server(payload))
                elif opcode == CLOSE:
                    raise ConnectionError(f"closed: {self.closed}")

    def _noted(self, message: ServerMessage) -> ServerMessage:
        if isinstance(message, Error) and message.limit:
            self.limits.append(message.limit)
        return message

    async def listen(self) -> None:
        """Read everything until the connection ends, keeping what it says of limits."""
        with contextlib.suppress(ConnectionError, OSError):
            while True:
                opcode, payload = await self.receive()
                if opcode == BINARY:
                    with contextlib.suppress(Refusal):
                        self._noted(decode_server(payload))
                elif opcode == CLOSE:
                    return

    def deaf(self) -> None:
        """Read nothing any more."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Abort."""
        if not self.writer.transport.is_closing():
            self.writer.transport.abort()
