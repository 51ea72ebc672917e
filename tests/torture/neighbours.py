"""A normal client of the verifier, and `/health` of its endpoint, beside each flood."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.torture.floods import Report
from tests.torture.http_floods import EVERY_FLOOD, HTTP_FLOODS, run_flood, seconds_of_health
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import Server

_HEALTH_SECONDS, _TIMES, _MEGABYTES, _LOG_BYTES = 0.2, 2.0, 150.0, 1_000_000
"""What a flood may cost: `/health` and the neighbour beyond what they take when calm, memory, and the log a minute."""
_REST = 3.0
"""Seconds until what was cut off has been put away."""


@dataclass
class Beside:
    """What a flood did. Times depend on what else the machine does: `load` is the work per core."""

    flood: str
    load: float
    health_seconds: float
    calm_health_seconds: float
    p50_ms: float
    calm_p50_ms: float
    p99_ms: float
    processor: float
    """Processor time of the verifier in a second: where it is far below 1, waiting was for other programs."""
    calm_processor: float
    megabytes: float
    """Growth, at most."""
    megabytes_after: float
    descriptors_after: int
    log_bytes_a_minute: float
    report: Report
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Find what is beyond its limit."""
        checks = {
            f"/health took {self.health_seconds:.2f} s, calm {self.calm_health_seconds:.2f}": self.health_seconds
            > _HEALTH_SECONDS + self.calm_health_seconds,
            f"a round took {self.p50_ms:.0f} ms, calm {self.calm_p50_ms:.0f}": self.p50_ms > _TIMES * self.calm_p50_ms,
            f"{self.megabytes:.0f} MB": self.megabytes > _MEGABYTES,
            f"{self.descriptors_after} descriptors leaked": self.descriptors_after > 8,
            f"{self.log_bytes_a_minute:.0f} bytes of log a minute": self.log_bytes_a_minute > _LOG_BYTES,
            "nothing was sent": not self.report.connections,
        }
        self.problems += [f"{self.flood}: {words}" for words, wrong in checks.items() if wrong]


async def _watched(server: Server, seconds: float) -> tuple[Watched, float, float]:
    """The neighbour for so long; the longest `/health` and the most memory meanwhile."""
    until, longest, most = time.monotonic() + seconds, 0.0, 0.0

    async def watch() -> None:
        nonlocal longest, most
        while time.monotonic() < until:
            await asyncio.sleep(0.02)
            longest = max(longest, await seconds_of_health(server.api_port))
            most = max(most, server.memory)

    seen, _ = await asyncio.gather(neighbour(server.url, server.honest, seconds), watch())
    return seen, longest, most


async def beside(server: Server, flood: str, seconds: float) -> Beside:
    """Run a flood from another process."""
    used, began = server.processor, time.monotonic()
    calm, calm_health, _ = await _watched(server, seconds)
    calm_processor = (server.processor - used) / (time.monotonic() - began)
    memory, descriptors, log = server.memory, server.descriptors, len(server.said)
    port = server.api_port if flood in HTTP_FLOODS else server.port
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        await loop.run_in_executor(process, run_flood, flood, port, "", 0.0)  # it has imported what it needs now
        used, began = server.processor, time.monotonic()
        flooding = loop.run_in_executor(process, run_flood, flood, port, server.greedy, seconds)
        seen, health, most = await _watched(server, seconds)
        report = await flooding
    elapsed = time.monotonic() - began  # a request that has begun is waited for
    await asyncio.sleep(_REST)
    result = Beside(
        flood=flood,
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
        health_seconds=health,
        calm_health_seconds=calm_health,
        p50_ms=seen.p50,
        calm_p50_ms=calm.p50,
        p99_ms=seen.percentile(0.99),
        processor=(server.processor - used) / elapsed,
        calm_processor=calm_processor,
        megabytes=max(0.0, most - memory),
        megabytes_after=server.memory - memory,
        descriptors_after=server.descriptors - descriptors,
        log_bytes_a_minute=(len(server.said) - log) * 60 / elapsed,
        report=report,
        problems=[f"{flood}: {one}" for one in problems(calm, seen)],
    )
    result.judge()
    print(json.dumps(result, default=vars), flush=True)
    return result


async def all_beside(server: Server, seconds: float, names: Sequence[str] = ()) -> list[Beside]:
    """Each flood in turn; it is repeated once if it exceeds a limit, since another program may have had the machine."""
    await neighbour(server.url, server.honest, 2.0)
    results = []
    for name in names or EVERY_FLOOD:
        result = await beside(server, name, seconds)
        results.append(await beside(server, name, seconds) if result.problems else result)
    return results
