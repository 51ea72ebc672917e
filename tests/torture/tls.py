"""One end of a TLS connection by hand, so that it can end it by halves: with TLS's own word of the
end or without, with TCP's or without, while it goes on reading or not."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import pytest

_READ = 2**14
_RECORD = b"\x17\x03\x03\x00\x20" + bytes(32)
"""A TLS record of data that nobody has encrypted."""


def certificate(folder: Path, days: int = 30) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    chain = folder / "certificate"
    key = folder / "key"
    made = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        str(days),
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    )
    subprocess.run(
        ["openssl", *made, "-keyout", key, "-out", chain], check=True, capture_output=True
    )
    return chain, key


def trusting(chain: Path) -> ssl.SSLContext:
    """What a client checks this certificate with."""
    return ssl.create_default_context(cafile=str(chain))


class TlsPeer:
    """One end of a TLS connection over a TCP connection that is there."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._arrived = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived,
            self._to_send,
            server_side=server_side,
            server_hostname=None if server_side else "localhost",
        )

    @classmethod
    async def connect(cls, port: int, context: ssl.SSLContext) -> TlsPeer:
        """A client whose TLS handshake is over."""
        made = cls(*await asyncio.open_connection("127.0.0.1", port), context)
        await made.shake()
        return made

    async def shake(self) -> None:
        """The TLS handshake."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._take()
        await self._flush()

    async def write(self, data: bytes) -> None:
        """Send, and wait until the socket has taken most of it."""
        self._tls.write(data)
        await self._flush()

    async def read(self) -> bytes:
        """The next bytes; none when the other end has said that there are no more. A
        `ConnectionError` where TCP ends without that."""
        while True:
            try:
                return self._tls.read(_READ)
            except ssl.SSLWantReadError:
                await self._take()
            except ssl.SSLZeroReturnError:
                return b""

    async def read_until(self, end: bytes) -> bytes:
        """Bytes up to those."""
        found = b""
        while end not in found:
            piece = await self.read()
            if not piece:
                raise ConnectionError("the other end has nothing more to say")
            found += piece
        return found

    # ---- ends

    async def say_end(self) -> None:
        """TLS's own word of the end (close_notify): nothing is written behind it, but all is read."""
        # It then wants the other end's word, and not what that end has still sent: ours is made
        # before.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        await self._flush()

    async def end_tcp(self) -> None:
        """TCP's end of what this end sends, whatever TLS has said."""
        await self._flush()
        self._writer.write_eof()

    async def talk_nonsense(self) -> None:
        """Bytes that no key has encrypted."""
        self._writer.write(_RECORD)
        await self._writer.drain()

    def deaf(self) -> None:
        """Read nothing any more, not even from TCP."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def hear(self) -> None:
        """Read again."""
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def poured_out(self) -> bytes:
        """All that TCP still brings, as it is, until the other end has ended it or reset it."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self._reader.read(_READ):
                found += piece
        return found

    async def gone(self) -> None:
        """Abort, and wait until the socket is closed."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    # ---- bytes

    async def _flush(self) -> None:
        """Send what TLS has made."""
        self._writer.write(self._to_send.read())
        await self._writer.drain()

    async def _take(self) -> None:
        """Give TLS what arrives."""
        piece = await self._reader.read(_READ)
        if not piece:
            raise ConnectionError("TCP has ended")
        self._arrived.write(piece)


WAYS = (
    "TLS ends, TCP stays",
    "TLS ends, then TCP",
    "TCP ends without TLS",
    "TLS ends, and talks on",
    "TLS ends, and is deaf",
    "TCP ends, and is deaf",
    "nonsense",
)
"""How a connection is ended by one half."""


async def end_by(way: str, peer: TlsPeer) -> None:
    """End a connection in this way. The end that does so goes on reading, unless it is deaf."""
    if "deaf" in way:
        peer.deaf()
    if way.startswith("TLS ends"):
        await peer.say_end()
    if way.startswith("TCP ends") or "then TCP" in way:
        await peer.end_tcp()
    if "talks on" in way or way == "nonsense":
        await peer.talk_nonsense()


async def share_of_the_processor(seconds: float = 0.05) -> float:
    """How much of this time the event loop's thread works while nobody asks it anything: about all
    of it where a socket that has ended is read in a loop. A busy machine makes it less. Something
    else that takes the thread once, such as a garbage collection, is not taken for that loop."""
    shares = []
    for _ in range(3):
        began = time.monotonic()
        spent = time.thread_time()
        await asyncio.sleep(seconds)
        shares.append((time.thread_time() - spent) / (time.monotonic() - began))
        if shares[-1] < 0.5:
            break
    return min(shares)
