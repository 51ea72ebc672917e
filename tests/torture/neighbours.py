"""A normal client of the verifier, and `/health` of its endpoint, beside each flood."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.torture.floods import EVERY_FLOOD, HTTP_FLOODS, Report, run_flood, seconds_of_health
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import SOAKED, Server, server
from tests.torture.tally import Found

_HEALTH_SECONDS, _TIMES, _MEGABYTES, _LOG_BYTES = 0.2, 2.0, 150.0, 1_000_000
"""What a flood may cost: `/health` and the neighbour beyond what they take when calm, memory, and
the log a minute."""
_REST = 30.0
"""Seconds until what was cut off has been put away, at most."""
_DESCRIPTORS = 8
"""Descriptors that may be open afterwards beside those before."""


@dataclass(frozen=True)
class Beside:
    """What a flood did."""

    flood: str
    figures: dict[str, tuple[float, float]]
    """Each with its limit. Times depend on what else the machine does: where the verifier's
    processor time in a second is far below 1, waiting was for other programs."""
    report: Report
    texts: list[str]
    """What was wrong with the neighbour's."""

    @property
    def problems(self) -> list[str]:
        """What is beyond its limit."""
        beyond = [
            f"{name}: {found:.2f} of {limit:.2f}"
            for name, (found, limit) in self.figures.items()
            if found > limit
        ]
        nothing = [] if self.report.connections else ["nothing was sent"]
        return [f"{self.flood}: {one}" for one in (*beyond, *nothing, *self.texts)]


async def _watched(running: Server, seconds: float) -> tuple[Watched, float, float, float]:
    """The neighbour for so long; meanwhile the longest `/health`, the most memory, and the
    processor time a second."""
    began = time.monotonic()
    used = running.processor
    longest = 0.0
    most = 0.0

    async def watch() -> None:
        nonlocal longest, most
        while time.monotonic() < began + seconds:
            await asyncio.sleep(0.02)
            longest = max(longest, await seconds_of_health(running.api_port))
            most = max(most, running.memory)

    seen, _ = await asyncio.gather(neighbour(running.url, running.honest, seconds), watch())
    return seen, longest, most, (running.processor - used) / (time.monotonic() - began)


async def beside(running: Server, flood: str, seconds: float) -> Beside:
    """Run a flood from another process."""
    calm, calm_health, _, calm_processor = await _watched(running, seconds)
    memory = running.memory
    descriptors = running.descriptors
    log = len(running.said)
    port = running.api_port if flood in HTTP_FLOODS else running.port
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        await loop.run_in_executor(
            process, run_flood, flood, port, "", 0.0
        )  # it has imported what it needs now
        began = time.monotonic()
        flooding = loop.run_in_executor(process, run_flood, flood, port, running.greedy, seconds)
        seen, health, most, processor = await _watched(running, seconds)
        report = await flooding  # a request that has begun is waited for
    elapsed = time.monotonic() - began
    rest = time.monotonic() + _REST
    while running.descriptors > descriptors + _DESCRIPTORS and time.monotonic() < rest:
        await asyncio.sleep(0.05)
    figures = {
        "/health, s": (health, _HEALTH_SECONDS + calm_health),
        "/health when calm, s": (calm_health, math.inf),
        "p50, ms": (seen.p50, _TIMES * calm.p50),
        "p50 when calm, ms": (calm.p50, math.inf),
        "p99, ms": (seen.percentile(0.99), math.inf),
        "processor time in a second, s": (processor, math.inf),
        "the same when calm, s": (calm_processor, math.inf),
        "megabytes at most": (most - memory, _MEGABYTES),
        "megabytes afterwards": (running.memory - memory, _MEGABYTES),
        "descriptors leaked": (running.descriptors - descriptors, _DESCRIPTORS),
        "bytes of log a minute": ((len(running.said) - log) * 60 / elapsed, _LOG_BYTES),
        "load of a core": (os.getloadavg()[0] / (os.cpu_count() or 1), math.inf),
    }
    result = Beside(flood, figures, report, problems(calm, seen))
    print(json.dumps(result, default=vars), *result.problems, sep="\n  ", flush=True)
    return result


async def all_beside(options: argparse.Namespace) -> Found:
    """Each flood in turn; it is repeated once if it exceeds a limit, since another program may have
    had the machine."""
    results = []
    async with server(*SOAKED) as running:
        await neighbour(running.url, running.honest, 2.0)
        for name in EVERY_FLOOD:
            result = await beside(running, name, options.seconds)
            results.append(
                await beside(running, name, options.seconds) if result.problems else result
            )
        problems = [problem for one in results for problem in one.problems] + running.complaints()
    return {"floods": results}, problems
