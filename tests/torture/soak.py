"""Hours of mixed load with faults, sampled, to see whether anything grows. The slopes are pure."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.events import Done, Event
from tests.torture.device import demo_device, story
from tests.torture.floods import FLOODS, Report
from tests.torture.fuzz import fuzz
from tests.torture.history import violations
from tests.torture.http_floods import HTTP_FLOODS, seconds_of_health
from tests.torture.kills import Asker, Toll
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import Server
from tests.torture.short_connections import ShortConnections

_FUZZING = 10.0
"""Seconds at most, then a flood has its turn."""
_MILD = ("cancels", "bad messages", "wrong verifies", "half handshakes")
_STUCK = 120.0
"""Seconds. An answer over connections that are cut all the time takes a few."""


@dataclass(frozen=True)
class Sample:
    """The state of the process at a time."""

    second: float
    megabytes: float
    descriptors: int
    slots_free: float
    pages_free: float
    p50_ms: float
    processor_ms: float
    """Processor time of a round: what latency is when nobody else wants the machine."""
    health_ms: float = math.nan
    """The longest that `/health` of the endpoint took since the last sample."""


@dataclass(frozen=True)
class Slope:
    """How much something grows an hour, and the standard error of that."""

    an_hour: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether zero is within two standard errors."""
        return abs(self.an_hour) <= 2 * self.error


@dataclass
class Soaked:
    """The result of a soak."""

    samples: list[Sample] = field(default_factory=list)
    toll: Toll = field(default_factory=Toll)
    hostile: Counter[str] = field(default_factory=Counter)
    short: Counter[str] = field(default_factory=Counter)
    """What was answered over connections that are cut after 0.5 to 7 kB."""

    def slopes(self) -> dict[str, Slope]:
        """Of everything that is sampled; the first quarter is left out: what it takes to warm up is no growth."""
        return slopes(self.samples[len(self.samples) // 4 :])


def slopes(samples: Sequence[Sample]) -> dict[str, Slope]:
    """The slope of each quantity that was seen three times; a sample without an answer says nothing of latency."""
    names = [one.name for one in fields(Sample) if one.name != "second"]
    seen = {name: [(one.second, getattr(one, name)) for one in samples] for name in names}
    found = {name: [(at, value) for at, value in pairs if math.isfinite(value)] for name, pairs in seen.items()}
    return {name: slope(*zip(*pairs, strict=True)) for name, pairs in found.items() if len(pairs) > 2}


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares. A sample that is mostly like the one before says little more than that one: the error counts such
    samples for less, by the correlation of neighbours."""
    n, x, y = len(seconds), sum(seconds) / len(seconds), sum(values) / len(values)
    spread = sum((s - x) ** 2 for s in seconds)
    by = sum((s - x) * (v - y) for s, v in zip(seconds, values, strict=True)) / spread
    rest = [v - y - by * (s - x) for s, v in zip(seconds, values, strict=True)]
    square = sum(r * r for r in rest)
    alike = sum(a * b for a, b in itertools.pairwise(rest)) / square if square else 0.0
    alike = min(max(alike, 0.0), 1 - 2 / n)
    error = math.sqrt(square / max(1, n - 2) / spread * (1 + alike) / (1 - alike))
    return Slope(3600 * by, 3600 * error)


async def soak(server: Server, seconds: float, seed: int, out: Path | None = None) -> Soaked:
    """Clients that come and go, cuts, a fuzzer and a flood now and then; a sample every few seconds, kept in `out`.

    Each rests longer than it works: the load is light, so that what a sample says of latency is of the verifier.
    """
    until, rng, result, began = time.monotonic() + seconds, random.Random(seed), Soaked(), time.monotonic()

    calm, device, longest = await neighbour(server.port, server.honest, 2.0), demo_device(), list[float]()

    def note(seen: Watched) -> None:
        result.toll.wrong += problems(calm, seen)
        result.toll.answers += len(seen.texts)

    async def churn() -> None:
        while time.monotonic() < until:
            note(await neighbour(server.port, server.honest, rng.uniform(0.2, 1.0)))
            await asyncio.sleep(rng.uniform(2.0, 6.0))

    async def cut(number: int) -> None:
        asker = Asker(server.port, seed + number, result.toll, entries := [], server.honest)
        prompt = [40 + number, *range(60, 75)]
        truth = await asker.answer("calm", prompt)
        while time.monotonic() < until:
            entries.clear()
            harm = asyncio.create_task(_cuts(asker, result.toll, rng))
            await asker.answer("cut", prompt)
            harm.cancel()
            result.toll.wrong += violations(entries, {"cut": [*prompt, *truth]})
            await asyncio.sleep(rng.uniform(1.0, 4.0))
        await asker.end()

    async def hostile() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionError, OSError, TimeoutError):
                turn = time.monotonic() + _FUZZING
                result.hostile += await fuzz(server.port, server.greedy, 100, rng.getrandbits(32), until=turn)
            await asyncio.sleep(rng.uniform(5.0, 15.0))
            name = rng.choice([*_MILD, *HTTP_FLOODS])
            flood, port = (FLOODS[name], server.port) if name in FLOODS else (HTTP_FLOODS[name], server.api_port)
            await flood(port, server.greedy, time.monotonic() + rng.uniform(0.2, 0.5), report := Report())
            result.hostile[f"flood of {name}"] += 1
            result.hostile.update({f"{name}: {how}": count for how, count in report.closes.items()})
            await asyncio.sleep(rng.uniform(5.0, 15.0))

    async def short() -> None:
        prompt = [50, *range(60, 75)]
        asker = Asker(server.port, seed + 50, result.toll, [], server.honest)
        truth = await asker.answer("calm", prompt)
        await asker.end()
        async with ShortConnections(server.port, rng).running() as proxy:
            while time.monotonic() < until:
                try:
                    async with asyncio.timeout(_STUCK):
                        result.toll.wrong += await _askers_answer(proxy, server, prompt, truth, result.short)
                        result.toll.wrong += await _devices_answer(proxy, server, device, prompt, truth, result.short)
                except TimeoutError:
                    result.toll.wrong.append(f"no answer in {_STUCK:.0f} s over short connections")
                result.short["cuts"] = proxy.cuts
                await asyncio.sleep(rng.uniform(4.0, 12.0))

    async def watch_health() -> None:
        while time.monotonic() < until:
            longest.append(await seconds_of_health(server.api_port, every=0.5))

    async def sample() -> None:
        while time.monotonic() < until:
            used = server.processor
            note(seen := await neighbour(server.port, server.honest, 1.0))
            cost = 1000 * (server.processor - used) / max(1, len(seen.seconds))
            free = await server.metrics()
            result.samples.append(
                Sample(
                    second=time.monotonic() - began,
                    megabytes=server.memory,
                    descriptors=server.descriptors,
                    slots_free=free["moa_slots_free"],
                    pages_free=free["moa_kv_pages_free"],
                    p50_ms=seen.p50,
                    processor_ms=cost,
                    health_ms=1000 * max(longest, default=math.nan),
                )
            )
            longest.clear()
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(result.samples[-1])) + "\n")
            await asyncio.sleep(9.0)

    await asyncio.gather(churn(), cut(0), cut(1), short(), hostile(), watch_health(), sample())
    return result


async def _cuts(asker: Asker, toll: Toll, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        toll.cuts += asker.cut()


async def _askers_answer(
    proxy: ShortConnections, server: Server, prompt: list[int], truth: list[int], counts: Counter[str]
) -> list[str]:
    """An answer by the protocol alone, which is complete only when all of it is verified."""
    asker = Asker(proxy.port, proxy.rng.getrandbits(32), Toll(), entries := [], server.honest)
    await asker.answer("short", prompt)
    await asker.end()
    counts["complete"] += 1
    return violations(entries, {"short": [*prompt, *truth]})


async def _devices_answer(
    proxy: ShortConnections, server: Server, device: Device, prompt: list[int], truth: list[int], counts: Counter[str]
) -> list[str]:
    """A device's answer, with records and guesses: verified, or its own where the verifier was not reached in time."""
    url, events = f"ws://127.0.0.1:{proxy.port}", list[Event]()
    async with EdgeClient(device=device, verifier=url, token=server.honest, reconnect_seconds=0.5) as client:
        async for event in client.generate(ids=prompt, max_new_tokens=len(truth), ignore_eos=True):
            events.append(event)
    verified = any(isinstance(event, Done) and event.verified for event in events)
    counts["verified on a device" if verified else "not verified on a device"] += 1
    return violations(story(events), {"turn": [*prompt, *truth]} if verified else {})
