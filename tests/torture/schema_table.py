"""Schemas that once took a verifier down, each through the endpoint of a running one with 5 GB of
address space: when the request ends, and what another principal waits meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import statistics
import string
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.torture.floods import ask
from tests.torture.server import SOAKED, Server, server
from tests.torture.tally import Found

_SECONDS = 3.0
_OWN_SECONDS = 1.0
_PLAIN_SECONDS = 0.2
_MEGABYTES = 50
_ADDRESS_SPACE = 5 * 10**9
_CALM = 1.0
"""Load for each core up to which times are judged."""
_LOOKS = 7
_ENDED = (200, 400)


def _multiples(*factors: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "multipleOf": one} for one in factors]}


def _patterns(count: int) -> dict[str, Any]:
    letters = string.ascii_letters[:count]
    return {"allOf": [{"type": "string", "pattern": f".*{one}.*"} for one in letters]}


def _referring(*factors: int) -> dict[str, Any]:
    """Which no check before the compiler sees."""
    names = [f"m{number}" for number in range(len(factors))]
    links = itertools.pairwise([*names, "end"])
    defs: dict[str, Any] = {
        name: {"type": "integer", "multipleOf": factor, "$ref": f"#/$defs/{after}"}
        for factor, (name, after) in zip(factors, links, strict=True)
    }
    return {"$defs": defs | {"end": {"type": "integer"}}, "$ref": "#/$defs/m0"}


SCHEMAS: dict[str, dict[str, Any]] = {
    **{
        f"multipleOf {factor:,}": {"type": "integer", "multipleOf": factor}
        for factor in (99_991, 999_983, 3_000_001, 9_999_991)
    },
    "five factors": _multiples(7, 11, 13, 17, 19),
    "six factors": _multiples(7, 11, 13, 17, 19, 23),
    "factors behind references": _referring(9973, 9967),
    **{f"{count} patterns": _patterns(count) for count in (12, 14, 16, 18, 20, 24, 52)},
}


@dataclass(frozen=True)
class Row:
    """What happened beside one schema."""

    schema: str
    bytes: int
    status: int
    seconds: float
    neighbours_own: float
    """The longest request of the other principal with a schema of its own."""
    neighbours_plain: float
    megabytes: float
    load: float

    @property
    def problems(self) -> list[str]:
        """What is beyond its limit."""
        wrong = [] if self.status in _ENDED else [f"HTTP {self.status}"]
        wrong += [f"{self.megabytes:.0f} MB"] if self.megabytes > _MEGABYTES else []
        if self.load < _CALM * (os.cpu_count() or 1):
            times = {
                "until it ended": (self.seconds, _SECONDS),
                "for the neighbour's own schema": (self.neighbours_own, _OWN_SECONDS),
                "for its plain answer": (self.neighbours_plain, _PLAIN_SECONDS),
            }
            wrong += [f"{s:.2f} s {name}" for name, (s, most) in times.items() if s > most]
        return [f"{self.schema}: {one}" for one in wrong]


async def _asked(running: Server, key: str, schema: dict[str, Any] | None) -> tuple[int, float]:
    body: dict[str, Any] = {
        "model": "target",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    }
    if schema is not None:
        given = {"name": "x", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": given}
    began = time.monotonic()
    status = await ask(running.api_port, "/v1/chat/completions", json.dumps(body).encode(), key)
    return status, time.monotonic() - began


async def table(options: argparse.Namespace) -> Found:
    """All of them, one after the other."""
    fresh = itertools.count()
    rows = []
    async with server(*SOAKED) as running:
        running.process.rlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))

        async def own() -> float:
            properties = {f"n{next(fresh)}": {"type": "integer"}}
            schema = {"type": "object", "properties": properties}
            return (await _asked(running, running.honest, schema))[1]

        async def plain() -> float:
            return (await _asked(running, running.honest, None))[1]

        calm = {"own": await _typical(own), "plain": await _typical(plain)}
        await _asked(running, running.greedy, {"type": "boolean"})
        for name, schema in SCHEMAS.items():
            memory = running.memory
            attack = asyncio.create_task(_asked(running, running.greedy, schema))
            own_times = [await own()]
            plain_times = [await plain()]
            while not attack.done():
                own_times.append(await own())
                plain_times.append(await plain())
            status, seconds = await attack
            row = Row(
                schema=name,
                bytes=len(json.dumps(schema)),
                status=status,
                seconds=round(seconds, 2),
                neighbours_own=round(max(own_times), 2),
                neighbours_plain=round(max(plain_times), 2),
                megabytes=round(running.memory - memory, 1),
                load=os.getloadavg()[0],
            )
            rows.append(row)
            print(row, *row.problems, sep="\n  ", flush=True)
        wrong = [problem for row in rows for problem in row.problems] + running.complaints()
    return {"calm": calm, "table": rows}, wrong


async def _typical(look: Callable[[], Awaitable[float]]) -> float:
    return round(statistics.median([await look() for _ in range(_LOOKS)]), 3)
