"""Hours of mixed load with faults, sampled; and whether anything grows. The slopes are pure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.torture.floods import FLOODS, Report
from tests.torture.fuzz import fuzz
from tests.torture.neighbour import neighbour
from tests.torture.server import Server

_MILD = ("cancels", "bad messages", "wrong verifies", "half handshakes")


@dataclass(frozen=True)
class Sample:
    """The state of the process at a time."""

    second: float
    megabytes: float
    descriptors: int
    p50_ms: float


@dataclass(frozen=True)
class Slope:
    """How much something grows an hour, and the standard error of that."""

    an_hour: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether zero is within two standard errors."""
        return abs(self.an_hour) <= 2 * self.error


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares."""
    n, x, y = len(seconds), sum(seconds) / len(seconds), sum(values) / len(values)
    spread = sum((s - x) ** 2 for s in seconds)
    by = sum((s - x) * (v - y) for s, v in zip(seconds, values, strict=True)) / spread
    rest = sum((v - y - by * (s - x)) ** 2 for s, v in zip(seconds, values, strict=True))
    return Slope(3600 * by, 3600 * math.sqrt(rest / max(1, n - 2) / spread))


async def soak(server: Server, seconds: float, seed: int, out: Path | None = None) -> dict[str, Slope]:
    """Honest clients that come and go, a fuzzer, and a flood now and then; a sample every few seconds."""
    until, rng, samples = time.monotonic() + seconds, random.Random(seed), list[Sample]()
    began = time.monotonic()

    async def honest() -> None:
        while time.monotonic() < until:
            await neighbour(server.port, server.honest, rng.uniform(0.5, 5.0))

    async def hostile() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionError, OSError, TimeoutError):
                await fuzz(server.port, server.greedy, 200, rng.getrandbits(32))
            stretch = rng.uniform(0.5, 2.0)
            await FLOODS[rng.choice(_MILD)](server.port, server.greedy, time.monotonic() + stretch, Report())

    async def sample() -> None:
        while time.monotonic() < until:
            seen = await neighbour(server.port, server.honest, 2.0)
            now = time.monotonic() - began
            samples.append(Sample(now, server.memory, server.descriptors, seen.p50))
            if out is not None:
                out.write_text(json.dumps([asdict(one) for one in samples]))
            await asyncio.sleep(3.0)

    await asyncio.gather(honest(), honest(), hostile(), sample())
    settled = samples[len(samples) // 4 :]  # what it takes to warm up is no growth
    at = [one.second for one in settled]
    return {
        "memory, MB": slope(at, [one.megabytes for one in settled]),
        "descriptors": slope(at, [one.descriptors for one in settled]),
        "p50, ms": slope(at, [one.p50_ms for one in settled]),
    }
