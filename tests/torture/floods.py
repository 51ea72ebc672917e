"""Hostile clients, each within the rules of websockets and most within those of the protocol.

A flood is a coroutine that runs for some seconds and knows only the server's port and a token. It records errors and
closes in a `Report`, and reconnects at once when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moa.grammar.spec import Grammar
from moa.wire import chain_hash
from moa.wire.messages import (
    Ack,
    Cancel,
    Close,
    Error,
    Message,
    Open,
    Resume,
    Sampling,
    ServerMessage,
    Stream,
    StreamTokens,
    Sync,
    Verdict,
    Verify,
)
from tests.grammar.hostile import hostile
from tests.torture.raw import BINARY, PING, PONG, Raw, binary, frame

_CONNECTIONS = 4
_BLOB = 64 * 1024


@dataclass
class Report:
    """The result of a flood."""

    sent: int = 0
    """Bytes."""
    connections: int = 0
    refused: int = 0
    """Connections that were not let in."""
    limits: Counter[str] = field(default_factory=Counter)
    closes: Counter[str] = field(default_factory=Counter)

    def note(self, raw: Raw) -> None:
        """A connection has ended."""
        self.limits.update(raw.limits)
        self.closes[f"{raw.closed[0]} {raw.closed[1]}" if raw.closed else "cut"] += 1


Flood = Callable[[int, str, float, Report], Awaitable[None]]
Blob = bytes | Callable[[Raw], Awaitable[bytes]]
"""What is sent on a connection again and again; a function prepares the connection for it."""


def _on_each(lanes: int, body: Callable[[Raw, float, Report], Awaitable[None]]) -> Flood:
    """On each of so many lanes one connection after another, after hello and welcome."""

    async def lane(port: int, token: str, until: float, report: Report) -> None:
        while time.monotonic() < until:
            try:
                raw = await Raw.greeted(port, token)
            except (ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError):
                report.refused += 1
                await asyncio.sleep(0.2)
                continue
            report.connections += 1
            with contextlib.suppress(ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError):
                await body(raw, until, report)
            report.note(raw)
            raw.abort()

    async def flood(port: int, token: str, until: float, report: Report) -> None:
        await asyncio.gather(*(lane(port, token, until, report) for _ in range(lanes)))

    return flood


def _hosed(blob: Blob, *, reads: bool = True, connections: int = _CONNECTIONS) -> Flood:
    """Each connection sends as much as it can."""

    async def hose(raw: Raw, until: float, report: Report) -> None:
        data = blob if isinstance(blob, bytes) else await blob(raw)
        if not reads:
            raw.deaf()
        listening = asyncio.create_task(raw.listen()) if reads else None
        try:
            while (left := until - time.monotonic()) > 0:
                await asyncio.wait_for(raw.pour(data), max(0.1, left))
                report.sent += len(data)
                await asyncio.sleep(0)
        finally:
            if listening is not None:
                raw.writer.close()
                await asyncio.wait_for(listening, 2.0)

    return _on_each(connections, hose)


def _many(*messages: Message) -> bytes:
    one = b"".join(binary(message) for message in messages)
    return one * max(1, _BLOB // len(one))


def _ids(count: int) -> list[int]:
    return [40 + n % 50 for n in range(count)]


def _holes(rows: int) -> list[tuple[int, int]]:
    """Rows that a device says it holds, here and there."""
    return [(2 * row, 2 * row + 1) for row in range(rows)]


async def _opened(raw: Raw, length: int = 16, **how: Any) -> bytes:
    """The name of a session with a prompt of so many tokens."""
    session = os.urandom(16)
    raw.write(binary(Open(session=session, ids=_ids(length), **how)))
    await raw.message()
    return session


async def _acks(raw: Raw) -> bytes:
    """Acknowledgements on a connection with many sessions."""
    for _ in range(24):
        await _opened(raw, held=_holes(2000))
    return _many(Ack(2**40), Ack(0))


async def _wrong_verifies(raw: Raw) -> bytes:
    session = await _opened(raw)
    return _many(Verify(session, 7, 15, [40, 41, 42]), Verify(session, 1, 15, [99]))


async def _resumes(raw: Raw) -> bytes:
    """Resumes of a long session: each has its log hashed."""
    return _many(Resume(session=await _opened(raw, 4000), length=4000, chain=chain_hash(_ids(4000)), round=0))


async def _held(raw: Raw) -> bytes:
    return _many(Sync(session=await _opened(raw), held=_holes(4000)))


async def _replays(raw: Raw) -> bytes:
    """The answer of a settled stream, again and again."""
    stream = Stream(await _opened(raw, max_new_tokens=100, ignore_eos=True), 1, 15, speculate=False)
    raw.write(binary(stream))
    while not getattr(await raw.message(), "done", False):
        pass
    return _many(stream)


async def _penalty_chains(raw: Raw, until: float, report: Report) -> None:
    """Chains of 255 that the target agrees with, under a repetition penalty, from a long log."""
    how = {"sampling": Sampling(repetition_penalty=1.0001), "max_new_tokens": 4000, "ignore_eos": True}
    session, last, tokens = await _opened(raw, 4000, **how), _ids(4000)[-1], list[int]()
    raw.write(binary(Stream(session, 1, 3999)))
    while len(tokens) < 255:
        tokens += getattr(await raw.message(), "tokens", [])
    raw.write(binary(Cancel(session, 1)))
    while time.monotonic() < until:  # the same text again, now as one draft
        raw.write(binary(Verify(await _opened(raw, 4000, **how), 1, 3999, [last, *tokens[:255]])))
        while not isinstance(await raw.message(), Verdict | Error):
            pass
        report.sent += 1


async def _slow_reader(raw: Raw, until: float, report: Report) -> None:
    """Asks for all records of a long prompt, and reads a few bytes a second."""
    raw.write(binary(Open(session=os.urandom(16), ids=_ids(2000), records="fp16")))
    raw.deaf()
    while time.monotonic() < until:
        await raw.pour(binary(Ack(2**40)))
        await asyncio.sleep(0.2)


@functools.cache
def _grammars() -> Iterator[Grammar]:
    return itertools.cycle(list(hostile()))


async def _hostile_grammars(raw: Raw, until: float, report: Report) -> None:
    """Sessions under one hostile grammar after another, as many at once as a batch has room for; each asks for a
    stream."""
    while time.monotonic() < until:
        session, grammar = os.urandom(16), next(_grammars())
        raw.write(binary(Open(session=session, ids=_ids(20), grammar=grammar, max_new_tokens=40)))
        raw.write(binary(Stream(session=session, round=1, base=19)))
        report.sent += len(grammar.text)
        while not _ends(message := await raw.message(), session):
            pass
        report.closes["refused" if isinstance(message, Error) else "answered"] += 1
        raw.write(binary(Close(session=session)))


async def half_handshakes(port: int, token: str, until: float, report: Report) -> None:
    """A thousand TCP connections that send nothing, or half of a handshake."""
    async for held in held_open(port, until, report, most=1000, pause=0.01):
        if len(held) % 2 == 0:
            held[-1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")


async def held_open(
    port: int, until: float, report: Report, *, most: int, pause: float
) -> AsyncGenerator[list[Raw], None]:
    """One more connection after each pause, `most` at a time: all that are open, the newest last."""
    held: list[Raw] = []
    while time.monotonic() < until:
        try:
            held.append(await Raw.connect(port))
        except OSError:
            report.refused += 1
            await asyncio.sleep(0.01)
            continue
        report.connections += 1
        yield held
        if len(held) > most:
            held.pop(0).abort()
        await asyncio.sleep(pause)
    for raw in held:
        raw.abort()


def _ends(message: ServerMessage, session: bytes) -> bool:
    """Whether a session's only answer is over."""
    over = isinstance(message, Error) or (isinstance(message, StreamTokens) and message.done)
    return over and getattr(message, "session", b"") == session


FLOODS: dict[str, Flood] = {
    "pings": _hosed(frame(PING) * (_BLOB // 6)),
    "pings unread": _hosed(frame(PING, bytes(125)) * (_BLOB // 131), reads=False),
    "pongs": _hosed(frame(PONG) * (_BLOB // 6)),
    "fragments": _hosed((frame(BINARY, b"", final=False) + frame(0, b"", final=False) * 1000 + frame(0, b"\x90")) * 10),
    "acks": _hosed(_acks, connections=1),
    "cancels": _hosed(_many(*(Cancel(bytes([n] * 16), 1) for n in range(100)))),
    "wrong verifies": _hosed(_wrong_verifies),
    "refused openings": _hosed(_many(Open(session=bytes(16), ids=[2000] * 20_000))),
    "bad messages": _hosed(frame(BINARY, b"\x93\xa4open\xc4\x00") * (_BLOB // 20)),
    "resumes": _hosed(_resumes, connections=2),
    "held ranges": _hosed(_held),
    "replays": _hosed(_replays, connections=2),
    "replays unread": _hosed(_replays, reads=False, connections=8),
    "slow readers": _on_each(60, _slow_reader),
    "half handshakes": half_handshakes,
    "penalty chains": _on_each(1, _penalty_chains),
    "hostile grammars": _on_each(32, _hostile_grammars),
}
