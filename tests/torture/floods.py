"""Hostile clients, each within the rules of websockets and most within those of the protocol.

A flood is a coroutine that runs for some seconds and knows only the server's port and a token. It records errors and
closes in a `Report`, and reconnects at once when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

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


Blob = Callable[[Raw], Awaitable[bytes]]
"""Prepares a connection, and says what to send on it again and again."""


async def greeted(port: int, token: str, until: float, report: Report) -> AsyncIterator[Raw]:
    """One connection after another, after hello and welcome."""
    while time.monotonic() < until:
        try:
            raw = await Raw.greeted(port, token)
        except (ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError):
            report.refused += 1
            await asyncio.sleep(0.2)
            continue
        report.connections += 1
        yield raw


async def hose(
    port: int, token: str, until: float, report: Report, blob: Blob, *, reads: bool, pause: float = 0.0
) -> None:
    """One connection after another, each sending as much as it can."""
    async for raw in greeted(port, token, until, report):
        with contextlib.suppress(ConnectionError, OSError, TimeoutError):
            data = await blob(raw)
            if reads:
                listening = asyncio.create_task(raw.listen())
            else:
                raw.deaf()
            while time.monotonic() < until:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.1, until - time.monotonic())):
                    await raw.pour(data)
                report.sent += len(data)
                await asyncio.sleep(pause)
        if reads:
            raw.writer.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(listening, 2.0)
        report.note(raw)
        raw.abort()


def _many(messages: Sequence[Message]) -> bytes:
    one = b"".join(binary(message) for message in messages)
    return one * max(1, _BLOB // len(one))


async def _pings(raw: Raw) -> bytes:
    return frame(PING) * (_BLOB // 6)


async def _full_pings(raw: Raw) -> bytes:
    return frame(PING, bytes(125)) * (_BLOB // 131)


async def _pongs(raw: Raw) -> bytes:
    return frame(PONG) * (_BLOB // 6)


async def _fragments(raw: Raw) -> bytes:
    return (frame(BINARY, b"", final=False) + frame(0, b"", final=False) * 1000 + frame(0, b"\x90")) * 10


async def _acks(raw: Raw) -> bytes:
    """Acknowledgements on a connection with many sessions, each of which says that it holds rows here and there."""
    for number in range(24):
        held = [(2 * row, 2 * row + 1) for row in range(2000)]
        raw.write(binary(Open(session=os.urandom(16), ids=[40 + number % 8] * 20, held=held)))
        await raw.message()
    return _many([Ack(2**40), Ack(0)])


async def _cancels(raw: Raw) -> bytes:
    return _many([Cancel(os.urandom(16), 1) for _ in range(100)])


async def _wrong_verifies(raw: Raw) -> bytes:
    session = os.urandom(16)
    raw.write(binary(Open(session=session, ids=[40] * 16)))
    await raw.message()
    return _many([Verify(session, 7, 15, [40, 41, 42]), Verify(session, 1, 15, [99])])


async def _refused_openings(raw: Raw) -> bytes:
    return _many([Open(session=os.urandom(16), ids=[2000] * 20_000)])


async def _bad_messages(raw: Raw) -> bytes:
    return frame(BINARY, b"\x93\xa4open\xc4\x00") * (_BLOB // 20)


async def _resumes(raw: Raw) -> bytes:
    """Resumes of a long session: each has its log hashed."""
    session, ids = os.urandom(16), [40 + n % 50 for n in range(4000)]
    raw.write(binary(Open(session=session, ids=ids)))
    await raw.message()
    return _many([Resume(session=session, length=len(ids), chain=chain_hash(ids), round=0)])


async def _held(raw: Raw) -> bytes:
    session = os.urandom(16)
    raw.write(binary(Open(session=session, ids=[40] * 16)))
    await raw.message()
    return _many([Sync(session=session, held=[(2 * row, 2 * row + 1) for row in range(4000)])])


async def _replays(raw: Raw) -> bytes:
    """The answer of a settled stream, again and again."""
    session = os.urandom(16)
    raw.write(binary(Open(session=session, ids=[40] * 16, max_new_tokens=100, ignore_eos=True)))
    await raw.message()
    stream = Stream(session, 1, 15, speculate=False)
    raw.write(binary(stream))
    while not getattr(await raw.message(), "done", False):
        pass
    return _many([stream])


async def _penalty_chain(raw: Raw, session: bytes, ids: list[int]) -> None:
    sampling = Sampling(repetition_penalty=1.0001)
    raw.write(binary(Open(session=session, ids=ids, sampling=sampling, max_new_tokens=4000, ignore_eos=True)))
    await raw.message()


async def penalty_chains(port: int, token: str, until: float, report: Report) -> None:
    """Chains of 255 that the target agrees with, under a repetition penalty, from a long log."""
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionError, OSError, TimeoutError):
            raw = await Raw.greeted(port, token)
            report.connections += 1
            session, ids = os.urandom(16), [40 + n % 50 for n in range(4000)]
            await _penalty_chain(raw, session, ids)
            raw.write(binary(Stream(session, 1, len(ids) - 1)))
            tokens: list[int] = []
            while len(tokens) < 255:
                tokens += getattr(await raw.message(), "tokens", [])
            raw.write(binary(Cancel(session, 1)))
            while time.monotonic() < until:  # the same text again, now as one draft
                session = os.urandom(16)
                await _penalty_chain(raw, session, ids)
                raw.write(binary(Verify(session, 1, len(ids) - 1, [ids[-1], *tokens[:255]])))
                while type(await raw.message()).__name__ not in ("Verdict", "Error"):
                    pass
                report.sent += 1
            raw.abort()


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


async def slow_readers(port: int, token: str, until: float, report: Report) -> None:
    """Connections that ask for all records of a long prompt, and read a few bytes a second."""

    async def one() -> None:
        with contextlib.suppress(ConnectionError, OSError, TimeoutError):
            raw = await Raw.greeted(port, token)
            report.connections += 1
            raw.write(binary(Open(session=os.urandom(16), ids=[40 + n % 50 for n in range(2000)], records="fp16")))
            raw.deaf()
            while time.monotonic() < until:
                await raw.pour(binary(Ack(2**40)))
                await asyncio.sleep(0.2)
            report.note(raw)
            raw.abort()

    await asyncio.gather(*(one() for _ in range(60)))


def _hosed(blob: Blob, *, reads: bool = True, connections: int = _CONNECTIONS, pause: float = 0.0) -> Flood:
    async def flood(port: int, token: str, until: float, report: Report) -> None:
        await asyncio.gather(
            *(hose(port, token, until, report, blob, reads=reads, pause=pause) for _ in range(connections))
        )

    return flood


Flood = Callable[[int, str, float, Report], Awaitable[None]]


async def hostile_grammars(port: int, token: str, until: float, report: Report) -> None:
    """Sessions under each of the hostile grammars, as many at once as a batch has room for; each asks for a stream."""
    grammars, number = list(hostile()), itertools.count()

    async def lane() -> None:
        async for raw in greeted(port, token, until, report):
            with contextlib.suppress(ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError):
                while time.monotonic() < until:
                    session, grammar = os.urandom(16), grammars[next(number) % len(grammars)]
                    raw.write(binary(Open(session=session, ids=[40] * 20, grammar=grammar, max_new_tokens=40)))
                    raw.write(binary(Stream(session=session, round=1, base=19)))
                    report.sent += len(grammar.text)
                    while not _ends(message := await raw.message(), session):
                        pass
                    report.closes["refused" if isinstance(message, Error) else "answered"] += 1
                    raw.write(binary(Close(session=session)))
            raw.abort()

    await asyncio.gather(*(lane() for _ in range(32)))


def _ends(message: ServerMessage, session: bytes) -> bool:
    """Whether a session's only answer is over."""
    over = isinstance(message, Error) or (isinstance(message, StreamTokens) and message.done)
    return over and getattr(message, "session", b"") == session


FLOODS: dict[str, Flood] = {
    "pings": _hosed(_pings),
    "pings unread": _hosed(_full_pings, reads=False),
    "pongs": _hosed(_pongs),
    "fragments": _hosed(_fragments),
    "acks": _hosed(_acks, connections=1),
    "cancels": _hosed(_cancels),
    "wrong verifies": _hosed(_wrong_verifies),
    "refused openings": _hosed(_refused_openings),
    "bad messages": _hosed(_bad_messages),
    "resumes": _hosed(_resumes, connections=2),
    "held ranges": _hosed(_held),
    "replays": _hosed(_replays, connections=2),
    "replays unread": _hosed(_replays, reads=False, connections=8),
    "slow readers": slow_readers,
    "half handshakes": half_handshakes,
    "penalty chains": penalty_chains,
    "hostile grammars": hostile_grammars,
}


def run_flood(flood: Flood, port: int, token: str, seconds: float) -> None:
    """The body of a process: a flood for so long, then its report on standard output."""
    report = Report()
    asyncio.run(_run(flood, port, token, seconds, report))
    print(json.dumps(vars(report)))


async def _run(flood: Flood, port: int, token: str, seconds: float, report: Report) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds + 30):
            await flood(port, token, time.monotonic() + seconds, report)
