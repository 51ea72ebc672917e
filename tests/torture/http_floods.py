"""Hostile clients of the endpoint. They know its port and a key, as those of `floods` know a verifier's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from tests.api.large import large_request
from tests.torture.floods import FLOODS, Flood, Report, held_open
from tests.torture.raw import PATIENCE, Raw

_MODEL = "target"
_HEADS = ("Host: [::1:", "Host: x\r\nOrigin: http://[", "Host: a\r\nHost: b", "Host: \x00", "Host")
_HOST = "Host: 127.0.0.1"
_IDLE = 1200


async def ask(port: int, path: str, body: bytes = b"", key: str = "", host: str = _HOST) -> tuple[int, str]:
    """Status and body of one request on a connection of its own; status 0 if it is closed without an answer."""
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
    first, _, rest = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]) if first else 0, rest.decode(errors="replace")


async def seconds_of_health(port: int) -> float:
    """How long `/health` takes."""
    began = time.monotonic()
    await ask(port, "/health")
    return time.monotonic() - began


Request = tuple[str, bytes, str]
"""Path, body and host line."""


def _again_and_again(requests: Callable[[], list[Request]], *, lanes: int, keyed: bool = True) -> Flood:
    made = functools.cache(requests)  # writing megabytes of JSON would cost the flood more than they cost the endpoint

    async def lane(port: int, key: str, until: float, report: Report) -> None:
        for path, body, host in itertools.cycle(made()):
            if time.monotonic() >= until:
                return
            try:
                status, _ = await ask(port, path, body, key if keyed else "", host)
            except (ConnectionError, OSError, TimeoutError):
                status = 0
                await asyncio.sleep(0.02)
            report.connections += 1
            report.sent += len(body)
            report.closes[f"HTTP {status}" if status else "cut"] += 1

    async def flood(port: int, key: str, until: float, report: Report) -> None:
        made()
        until = max(until, time.monotonic() + 0.1)
        await asyncio.gather(*(lane(port, key, until, report) for _ in range(lanes)))

    return flood


def _predictions() -> list[Request]:
    return [(*large_request(_MODEL, name), _HOST) for name in ("prediction", "prediction of one letter")]


def _stop_texts() -> list[Request]:
    asked = {"model": _MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    texts: list[Any] = ["x" * 129, "x" * 200, "x" * 256, ["\u00e9" * 64] * 8, ["x"] * 16]
    return [("/v1/chat/completions", json.dumps({**asked, "stop": text}).encode(), _HOST) for text in texts]


async def _idle_connections(port: int, key: str, until: float, report: Report) -> None:
    """Connections without a key that are silent, or send half of a head and a byte of it now and then."""
    async for held in held_open(port, until, report, most=_IDLE, pause=0.002):
        if len(held) % 3:
            held[-1].write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        with contextlib.suppress(OSError):
            held[len(held) // 2].write(b"x")


HTTP_FLOODS: dict[str, Flood] = {
    "predictions": _again_and_again(_predictions, lanes=3),
    "idle connections": _idle_connections,
    "stop texts": _again_and_again(_stop_texts, lanes=4),
    "malformed heads": _again_and_again(lambda: [("/v1/models", b"", host) for host in _HEADS], lanes=4, keyed=False),
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
