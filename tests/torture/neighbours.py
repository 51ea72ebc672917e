"""A normal client of the verifier, and `/health` of its endpoint, beside each flood."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.torture.floods import Report
from tests.torture.http_floods import EVERY_FLOOD, HTTP_FLOODS, run_flood, seconds_of_health
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import Server

_HEALTH_SECONDS, _TIMES, _MEGABYTES, _LOG_BYTES = 0.2, 2.0, 150.0, 1_000_000
"""What a flood may cost: `/health` and the neighbour beyond what they take when calm, memory, and the log a minute."""
_REST = 3.0
"""Seconds until what was cut off has been put away."""


@dataclass(frozen=True)
class Beside:
    """What a flood did."""

    flood: str
    figures: dict[str, tuple[float, float]]
    """Each with its limit. Times depend on what else the machine does: where the verifier's processor time in a second
    is far below 1, waiting was for other programs."""
    report: Report
    texts: list[str]
    """What was wrong with the neighbour's."""

    @property
    def problems(self) -> list[str]:
        """What is beyond its limit."""
        beyond = [
            f"{name}: {found:.2f} of {limit:.2f}" for name, (found, limit) in self.figures.items() if found > limit
        ]
        nothing = [] if self.report.connections else ["nothing was sent"]
        return [f"{self.flood}: {one}" for one in (*beyond, *nothing, *self.texts)]


async def _watched(server: Server, seconds: float) -> tuple[Watched, float, float, float]:
    """The neighbour for so long; meanwhile the longest `/health`, the most memory, and the processor time a second."""
    began, used, longest, most = time.monotonic(), server.processor, 0.0, 0.0

    async def watch() -> None:
        nonlocal longest, most
        while time.monotonic() < began + seconds:
            await asyncio.sleep(0.02)
            longest = max(longest, await seconds_of_health(server.api_port))
            most = max(most, server.memory)

    seen, _ = await asyncio.gather(neighbour(server.url, server.honest, seconds), watch())
    return seen, longest, most, (server.processor - used) / (time.monotonic() - began)


async def beside(server: Server, flood: str, seconds: float) -> Beside:
    """Run a flood from another process."""
    calm, calm_health, _, calm_processor = await _watched(server, seconds)
    memory, descriptors, log = server.memory, server.descriptors, len(server.said)
    port = server.api_port if flood in HTTP_FLOODS else server.port
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        await loop.run_in_executor(process, run_flood, flood, port, "", 0.0)  # it has imported what it needs now
        began = time.monotonic()
        flooding = loop.run_in_executor(process, run_flood, flood, port, server.greedy, seconds)
        seen, health, most, processor = await _watched(server, seconds)
        report = await flooding  # a request that has begun is waited for
    elapsed = time.monotonic() - began
    await asyncio.sleep(_REST)
    figures = {
        "/health, s": (health, _HEALTH_SECONDS + calm_health),
        "/health when calm, s": (calm_health, math.inf),
        "p50, ms": (seen.p50, _TIMES * calm.p50),
        "p50 when calm, ms": (calm.p50, math.inf),
        "p99, ms": (seen.percentile(0.99), math.inf),
        "processor time in a second, s": (processor, math.inf),
        "the same when calm, s": (calm_processor, math.inf),
        "megabytes at most": (most - memory, _MEGABYTES),
        "megabytes afterwards": (server.memory - memory, _MEGABYTES),
        "descriptors leaked": (server.descriptors - descriptors, 8),
        "bytes of log a minute": ((len(server.said) - log) * 60 / elapsed, _LOG_BYTES),
        "load of a core": (os.getloadavg()[0] / (os.cpu_count() or 1), math.inf),
    }
    result = Beside(flood, figures, report, problems(calm, seen))
    print(json.dumps(result, default=vars), *result.problems, sep="\n  ", flush=True)
    return result


async def all_beside(server: Server, seconds: float, names: Sequence[str] = ()) -> list[Beside]:
    """Each flood in turn; it is repeated once if it exceeds a limit, since another program may have had the machine."""
    await neighbour(server.url, server.honest, 2.0)
    results = []
    for name in names or EVERY_FLOOD:
        result = await beside(server, name, seconds)
        results.append(await beside(server, name, seconds) if result.problems else result)
    return results
