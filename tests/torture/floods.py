"""Hostile clients, each within the rules of websockets and most within those of the protocol.

A flood is a coroutine that runs for some seconds and knows only the server's port and a token. It
records errors and closes in a `Report`, and reconnects at once when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from moa.wire import chain_hash
from moa.wire import messages as m
from tests.api.large import large_request
from tests.grammar.hostile import hostile
from tests.torture.raw import BINARY, PATIENCE, PING, PONG, Raw, binary, frame

_CONNECTIONS = 4
_BLOB = 64 * 1024
_GRAMMARS = itertools.cycle(hostile())
_MODEL = "target"
_HEADS = ("Host: [::1:", "Host: x\r\nOrigin: http://[", "Host: a\r\nHost: b", "Host: \x00", "Host")
_HOST = "Host: 127.0.0.1"


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


def on_lanes(lanes: int, lane: Flood) -> Flood:
    """The same on so many lanes at once."""

    async def flood(port: int, token: str, until: float, report: Report) -> None:
        await asyncio.gather(*(lane(port, token, until, report) for _ in range(lanes)))

    return flood


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
            with contextlib.suppress(
                ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError
            ):
                await body(raw, until, report)
            report.note(raw)
            raw.abort()

    return on_lanes(lanes, lane)


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


def _many(*messages: m.Message) -> bytes:
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
    raw.write(binary(m.Open(session=session, ids=_ids(length), **how)))
    await raw.message()
    return session


async def _acks(raw: Raw) -> bytes:
    """Acknowledgements on a connection with many sessions."""
    for _ in range(24):
        await _opened(raw, held=_holes(2000))
    return _many(m.Ack(2**40), m.Ack(0))


async def _wrong_rounds(raw: Raw) -> bytes:
    session = await _opened(raw)
    return _many(m.Stream(session, 7, 15), m.Stream(session, 1, 14))


async def _resumes(raw: Raw) -> bytes:
    """Resumes of a long session: each has its log hashed."""
    return _many(
        m.Resume(
            session=await _opened(raw, 4000), length=4000, chain=chain_hash(_ids(4000)), round=0
        )
    )


async def _held(raw: Raw) -> bytes:
    return _many(m.Sync(session=await _opened(raw), held=_holes(4000)))


async def _replays(raw: Raw) -> bytes:
    """The answer of a settled stream, again and again."""
    stream = m.Stream(
        await _opened(raw, max_new_tokens=100, ignore_eos=True), 1, 15, speculate=False
    )
    raw.write(binary(stream))
    while not getattr(await raw.message(), "done", False):
        pass
    return _many(stream)


async def _penalty_chains(raw: Raw, until: float, report: Report) -> None:
    """Chains of 255 that the target agrees with, under a repetition penalty, from a long log."""
    how = {
        "sampling": m.Sampling(repetition_penalty=1.0001),
        "max_new_tokens": 4000,
        "ignore_eos": True,
    }
    session = await _opened(raw, 4000, **how)
    last = _ids(4000)[-1]
    tokens = list[int]()
    raw.write(binary(m.Stream(session, 1, 3999)))
    while len(tokens) < 255:
        tokens += getattr(await raw.message(), "tokens", [])
    raw.write(binary(m.Cancel(session, 1)))
    chain = [last, *tokens[:255]]
    while time.monotonic() < until:  # the same text again, now as guesses
        again = await _opened(raw, 4000, **how)
        raw.write(binary(m.Stream(again, 1, 3999, waits=True)))
        raw.write(binary(m.Foresee(again, 1, 3999, chain, [*range(-1, 255)], [0] * len(chain))))
        left = len(chain)
        while left > 0:
            message = await raw.message()
            left -= len(getattr(message, "tokens", [])) or left * isinstance(message, m.Error)
        report.sent += 1


async def _slow_reader(raw: Raw, until: float, report: Report) -> None:
    """Asks for all records of a long prompt, and reads a few bytes a second."""
    raw.write(binary(m.Open(session=os.urandom(16), ids=_ids(2000), records="fp16")))
    raw.deaf()
    while time.monotonic() < until:
        await raw.pour(binary(m.Ack(2**40)))
        await asyncio.sleep(0.2)


async def _hostile_grammars(raw: Raw, until: float, report: Report) -> None:
    """Sessions under one hostile grammar after another, as many at once as a batch has room for;
    each asks for a stream."""
    while time.monotonic() < until:
        session = os.urandom(16)
        grammar = next(_GRAMMARS)
        raw.write(binary(m.Open(session=session, ids=_ids(20), grammar=grammar, max_new_tokens=40)))
        raw.write(binary(m.Stream(session=session, round=1, base=19)))
        report.sent += len(grammar.text)
        while not _ends(message := await raw.message(), session):
            pass
        report.closes["refused" if isinstance(message, m.Error) else "answered"] += 1
        raw.write(binary(m.Close(session=session)))


def holding(most: int, pause: float, say: Callable[[list[Raw]], None]) -> Flood:
    """One more connection after each pause, `most` at a time; `say` knows all that are open, the
    newest last."""

    async def flood(port: int, token: str, until: float, report: Report) -> None:
        held: list[Raw] = []
        while time.monotonic() < until:
            try:
                held.append(await Raw.connect(port))
            except OSError:
                report.refused += 1
                await asyncio.sleep(0.01)
                continue
            report.connections += 1
            with contextlib.suppress(OSError):
                say(held)
            if len(held) > most:
                held.pop(0).abort()
            await asyncio.sleep(pause)
        for raw in held:
            raw.abort()

    return flood


def _half_of_a_handshake(held: list[Raw]) -> None:
    """Or nothing at all."""
    if len(held) % 2 == 0:
        held[-1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")


def _ends(message: m.ServerMessage, session: bytes) -> bool:
    """Whether a session's only answer is over."""
    over = isinstance(message, m.Error) or (isinstance(message, m.StreamTokens) and message.done)
    return over and getattr(message, "session", b"") == session


FLOODS: dict[str, Flood] = {
    "pings": _hosed(frame(PING) * (_BLOB // 6)),
    "pings unread": _hosed(frame(PING, bytes(125)) * (_BLOB // 131), reads=False),
    "pongs": _hosed(frame(PONG) * (_BLOB // 6)),
    "fragments": _hosed(
        (frame(BINARY, b"", final=False) + frame(0, b"", final=False) * 1000 + frame(0, b"\x90"))
        * 10
    ),
    "acks": _hosed(_acks, connections=1),
    "cancels": _hosed(_many(*(m.Cancel(bytes([n] * 16), 1) for n in range(100)))),
    "wrong verifies": _hosed(_wrong_rounds),
    "refused openings": _hosed(_many(m.Open(session=bytes(16), ids=[2000] * 20_000))),
    "bad messages": _hosed(frame(BINARY, b"\x93\xa4open\xc4\x00") * (_BLOB // 20)),
    "resumes": _hosed(_resumes, connections=2),
    "held ranges": _hosed(_held),
    "replays": _hosed(_replays, connections=2),
    "replays unread": _hosed(_replays, reads=False, connections=8),
    "slow readers": _on_each(60, _slow_reader),
    "half handshakes": holding(1000, 0.01, _half_of_a_handshake),
    "penalty chains": _on_each(1, _penalty_chains),
    "hostile grammars": _on_each(32, _hostile_grammars),
}


# ---- of the endpoint: they know its port and a key, as those above know a verifier's


async def ask(port: int, path: str, body: bytes = b"", key: str = "", host: str = _HOST) -> int:
    """The status of one request on a connection of its own; 0 if it is closed without an answer."""
    raw = await Raw.connect(port)
    try:
        head = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", host, "Connection: close"]
        head += [f"Authorization: Bearer {key}"] if key else []
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        async with asyncio.timeout(PATIENCE):
            await raw.pour(("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + body)
            answer = await raw.reader.read(-1)
    finally:
        await raw.gone()
    return int(answer.split()[1]) if answer else 0


async def seconds_of_health(port: int) -> float:
    """How long `/health` takes."""
    began = time.monotonic()
    await ask(port, "/health")
    return time.monotonic() - began


Request = tuple[str, bytes, str]
"""Path, body and host line."""


def _again_and_again(
    requests: Callable[[], list[Request]], *, lanes: int, keyed: bool = True
) -> Flood:
    made = functools.cache(
        requests
    )  # writing megabytes of JSON would cost the flood more than they cost the endpoint

    async def lane(port: int, key: str, until: float, report: Report) -> None:
        again = itertools.cycle(made())
        until = max(until, time.monotonic() + 0.1)
        while time.monotonic() < until:
            path, body, host = next(again)
            try:
                status = await ask(port, path, body, key if keyed else "", host)
            except (ConnectionError, OSError, TimeoutError):
                status = 0
                await asyncio.sleep(0.02)
            report.connections += 1
            report.sent += len(body)
            report.closes[f"HTTP {status}" if status else "cut"] += 1

    return on_lanes(lanes, lane)


def _predictions() -> list[Request]:
    return [
        (*large_request(_MODEL, name), _HOST) for name in ("prediction", "prediction of one letter")
    ]


def _stop_texts() -> list[Request]:
    asked = {"model": _MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    texts: list[Any] = ["x" * 129, "x" * 200, "x" * 256, ["\u00e9" * 64] * 8, ["x"] * 16]
    return [
        ("/v1/chat/completions", json.dumps({**asked, "stop": text}).encode(), _HOST)
        for text in texts
    ]


def _half_of_a_head(held: list[Raw]) -> None:
    """Or nothing; and a byte of one now and then. None has a key."""
    if len(held) % 3:
        held[-1].write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    held[len(held) // 2].write(b"x")


HTTP_FLOODS: dict[str, Flood] = {
    "predictions": _again_and_again(_predictions, lanes=3),
    "idle connections": holding(1200, 0.002, _half_of_a_head),
    "stop texts": _again_and_again(_stop_texts, lanes=4),
    "malformed heads": _again_and_again(
        lambda: [("/v1/models", b"", host) for host in _HEADS], lanes=4, keyed=False
    ),
}
EVERY_FLOOD = FLOODS | HTTP_FLOODS


def run_flood(name: str, port: int, key: str, seconds: float) -> Report:
    """A flood for so long; the body of a process."""
    report = Report()

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 30):
                await EVERY_FLOOD[name](port, key, time.monotonic() + seconds, report)

    asyncio.run(run())
    return report
