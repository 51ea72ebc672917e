"""A normal client under each flood: its latency, the memory of the process, and the flooder's errors."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from tests.torture.floods import FLOODS
from tests.torture.neighbour import Watched, neighbour, problems
from tests.torture.server import Server


@dataclass(frozen=True)
class Result:
    """A flood and what it did."""

    flood: str
    p50_ms: float
    p99_ms: float
    idle_p50_ms: float
    idle_p99_ms: float
    rounds: int
    megabytes: float
    """Growth of the process, at most."""
    right: bool
    """Whether the neighbour's text was right."""
    report: dict[str, Any]

    def row(self) -> str:
        """One line of a table."""
        told = ", ".join(self.report["limits"]) or "-"
        return (
            f"| {self.flood} | {self.p50_ms:.1f} ({self.p50_ms / self.idle_p50_ms:.1f}x) "
            f"| {self.p99_ms:.0f} ({self.p99_ms / self.idle_p99_ms:.1f}x) | {self.rounds} | {self.megabytes:.0f} "
            f"| {told} | {'yes' if self.right else 'NO'} |"
        )


async def under(server: Server, flood: str, seconds: float, idle: Watched, memory: float) -> Result:
    """Run a flood from another process beside the neighbour."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.torture.floods", flood, str(server.port), server.greedy, str(seconds)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    await asyncio.sleep(1.0)  # it has imported what it needs, and begun
    most = 0.0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, server.memory - memory)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    seen = await neighbour(server.port, server.honest, seconds)
    watching.cancel()
    out, _ = await process.communicate()
    return Result(
        flood=flood,
        p50_ms=seen.p50,
        p99_ms=seen.percentile(0.99),
        idle_p50_ms=idle.p50,
        idle_p99_ms=idle.percentile(0.99),
        rounds=len(seen.seconds),
        megabytes=max(0.0, most),
        right=not problems(idle, seen),
        report=json.loads(out),
    )


async def all_floods(server: Server, seconds: float, names: list[str]) -> list[Result]:
    """Each flood in turn, with an idle stretch before each."""
    results = []
    await neighbour(server.port, server.honest, 2.0)
    memory = server.memory
    for name in names or list(FLOODS):
        idle = await neighbour(server.port, server.honest, seconds / 2)
        results.append(await under(server, name, seconds, idle, memory))
        print(results[-1].row(), flush=True)
    return results
