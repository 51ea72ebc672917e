"""Hours of mixed load with faults, sampled, to see whether anything grows. The slopes are pure."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from edge_client import EdgeClient
from edge_client.device import Device
from edge_client.tools.emulated_network import LinkProxy
from testing.devices import Script
from tests.torture.device import ask, demo_device
from tests.torture.floods import EVERY_FLOOD, HTTP_FLOODS, Report, seconds_of_health
from tests.torture.fuzz import fuzz
from tests.torture.kills import Link, Toll, answer, calm
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import SOAKED, Server, server
from tests.torture.tally import Found

_FUZZING = 10.0
"""Seconds at most, then a flood has its turn."""
_MILD = ("cancels", "bad messages", "wrong verifies", "half handshakes")
_STUCK = 120.0
"""Seconds. An answer over connections that are cut all the time takes a few."""
_SHORT = "complete", "verified"
_FEWEST, _MOST = 500, 7000
"""Bytes from the verifier until a short connection is cut, the handshake included."""


Sample = dict[str, float]
"""The state of the process at a `second`: not a number where something was not seen."""


@dataclass(frozen=True)
class Slope:
    """How much something grows an hour, and the standard error of that."""

    an_hour: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether zero is within two standard errors."""
        return abs(self.an_hour) <= 2 * self.error


def slopes(samples: Sequence[Sample]) -> dict[str, Slope]:
    """The slope of each quantity that was seen three times; a sample without an answer says nothing
    of latency."""
    found = {}
    for name in samples[0].keys() - {"second"} if samples else ():
        pairs = [(one["second"], one[name]) for one in samples if math.isfinite(one[name])]
        if len(pairs) > 2:
            found[name] = slope(*zip(*pairs, strict=True))
    return found


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares. A sample that is mostly like the one before says little more than that one:
    the error counts such samples for less, by the correlation of neighbours."""
    n, (by, start) = len(seconds), statistics.linear_regression(seconds, values)
    rest = [v - start - by * s for s, v in zip(seconds, values, strict=True)]
    square = sum(r * r for r in rest)
    alike = sum(a * b for a, b in itertools.pairwise(rest)) / square if square else 0.0
    alike = min(max(alike, 0.0), 1 - 2 / n)
    error = math.sqrt(
        square / max(1, n - 2) / (n * statistics.pvariance(seconds)) * (1 + alike) / (1 - alike)
    )
    return Slope(3600 * by, 3600 * error)


class ShortLink(LinkProxy):
    """Every connection is cut after so many bytes received, whatever is on its way. One client at a
    time."""

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.cut_after(self._random.randint(_FEWEST, _MOST), "down")
        await super()._accept(reader, writer)


async def soak(options: argparse.Namespace) -> Found:
    """Clients that come and go, cuts, a fuzzer and a flood now and then; a sample every few
    seconds, kept beside `out`.

    Each rests longer than it works: the load is light, so that what a sample says of latency is of
    the verifier.
    """
    async with server(*SOAKED) as running:
        samples, toll, hostile = await _soaked(running, options)
        wrong = [*toll.wrong[:5], *running.complaints()]
    found = slopes(samples[len(samples) // 4 :])  # what it takes to warm up is no growth
    wrong += [f"{name} is not flat: {one}" for name, one in found.items() if not one.flat]
    wrong += [
        f"no answer was {name} over short connections" for name in _SHORT if not toll.counts[name]
    ]
    return {"slopes": found, "toll": toll.counts, "hostile": hostile}, wrong


async def _soaked(
    running: Server, options: argparse.Namespace
) -> tuple[list[Sample], Toll, Counter[str]]:
    began = time.monotonic()
    until = began + 3600 * options.hours
    rng = random.Random(options.seed)
    samples = list[Sample]()
    toll = Toll()
    hostile = Counter[str]()
    out = options.out and options.out.with_suffix(".samples")
    undisturbed = await neighbour(running.url, running.honest, 2.0)
    device = demo_device()
    longest = list[float]()

    async def again_and_again(
        what: Callable[[], Awaitable[None]], least: float, most: float
    ) -> None:
        while time.monotonic() < until:
            await what()
            await asyncio.sleep(rng.uniform(least, most))

    def note(seen: Watched) -> None:
        toll.wrong += problems(undisturbed, seen)
        toll.counts["answers"] += len(seen.texts)

    async def churn() -> None:
        note(await neighbour(running.url, running.honest, rng.uniform(0.2, 1.0)))

    async def cut(link: Link, script: Script) -> None:
        cutting = asyncio.create_task(_cuts(link, toll, rng))
        await answer(link, script, toll, rng, running.honest)
        cutting.cancel()

    async def harm() -> None:
        with contextlib.suppress(ConnectionError, OSError, TimeoutError):
            turn = time.monotonic() + _FUZZING
            hostile.update(
                await fuzz(running.port, running.greedy, 100, rng.getrandbits(32), until=turn)
            )
        await asyncio.sleep(rng.uniform(5.0, 15.0))
        name = rng.choice([*_MILD, *HTTP_FLOODS])
        port = running.api_port if name in HTTP_FLOODS else running.port
        await EVERY_FLOOD[name](
            port, running.greedy, time.monotonic() + rng.uniform(0.2, 0.5), report := Report()
        )
        hostile[f"flood of {name}"] += 1
        hostile.update({f"{name}: {how}": count for how, count in report.closes.items()})

    async def short(link: ShortLink, script: Script) -> None:
        try:
            async with asyncio.timeout(_STUCK):
                await answer(link, script, toll, rng, running.honest)
                toll.counts["complete"] += 1
                await _devices_answer(link, running, device, script, toll)
        except TimeoutError:
            toll.wrong.append(f"no answer in {_STUCK:.0f} s over short connections")
        toll.counts["short connections"] = link.connections

    async def watch_health() -> None:
        longest.append(await seconds_of_health(running.api_port))

    async def sample() -> None:
        used = running.processor
        note(seen := await neighbour(running.url, running.honest, 1.0))
        free = await running.metrics()
        samples.append(
            {
                "second": time.monotonic() - began,
                "megabytes": running.memory,
                "descriptors": running.descriptors,
                "slots_free": free["moa_slots_free"],
                "pages_free": free["moa_kv_pages_free"],
                "p50_ms": seen.p50,
                # What latency is when nobody else wants the machine.
                "processor_ms_of_a_round": 1000
                * (running.processor - used)
                / max(1, len(seen.seconds)),
                "longest_health_ms": 1000 * max(longest, default=math.nan),
            }
        )
        longest.clear()
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(samples[-1]) + "\n")

    async with (
        Link(running.port, rng) as one,
        Link(running.port, rng) as two,
        ShortLink("127.0.0.1", running.port, seed=options.seed) as broken,
    ):
        scripts = await calm(running.url, 3, running.honest)
        await asyncio.gather(
            again_and_again(churn, 2.0, 6.0),
            again_and_again(lambda: cut(one, scripts[0]), 1.0, 4.0),
            again_and_again(lambda: cut(two, scripts[1]), 1.0, 4.0),
            again_and_again(lambda: short(broken, scripts[2]), 4.0, 12.0),
            again_and_again(harm, 5.0, 15.0),
            again_and_again(watch_health, 0.5, 0.5),
            again_and_again(sample, 9.0, 9.0),
        )
    return samples, toll, hostile


async def _cuts(link: Link, toll: Toll, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        toll.counts["cuts"] += link.lose()


async def _devices_answer(
    link: ShortLink, running: Server, device: Device, script: Script, toll: Toll
) -> None:
    """A device's answer, with records and guesses: verified, or its own where the verifier was not
    reached in time."""
    async with EdgeClient(
        device=device, verifier=link.url, token=running.honest, reconnect_seconds=0.5
    ) as client:
        told = await ask(client, _STUCK, len(script.truth), script.ids)
    toll.counts[told.done] += 1
    toll.wrong += told.problems
    if told.done == "verified" and told.answer != script.truth:
        toll.wrong.append(f"{told.answer}, not {script.truth}")
