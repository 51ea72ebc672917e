"""Two principals, one of them above its share; and a load of ten times the capacity."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.torture.neighbour import Watched, crowd, neighbour, problems
from tests.torture.server import Server


@dataclass(frozen=True)
class Shares:
    """The rounds of the other principal."""

    alone: int
    """Rounds in the time, alone."""
    beside: int
    """Rounds beside the greedy one, from asking on."""
    admitted: float
    """Seconds until its first verdict."""
    greedy: int
    wrong: list[str]

    @property
    def share(self) -> float:
        """Of what it gets alone."""
        return self.beside / max(1, self.alone)


async def two_principals(server: Server, seconds: float, sessions: int = 48) -> Shares:
    """One alone, then beside a greedy one that already has every slot."""
    alone = await neighbour(server.url, server.honest, seconds)
    async with crowd(server.url, server.greedy, sessions) as greedy:
        await asyncio.sleep(3.0)
        beside = await neighbour(server.url, server.honest, seconds)
    wrong = [*problems(alone, beside), *_of_each(greedy)]
    return Shares(len(alone.seconds), len(beside.seconds), beside.admitted, _rounds(greedy), wrong)


@dataclass(frozen=True)
class Overload:
    """The result of the overload."""

    sessions: int
    capacity_per_second: float
    """Verdicts when as many ask as can be served."""
    verdicts_per_second: float
    busy_per_second: float
    p99_ms: float
    """Of a neighbour of another principal, meanwhile."""
    megabytes: float
    after_p50_ms: float
    before_p50_ms: float
    wrong: list[str]


async def overload(server: Server, seconds: float, slots: int, times: int = 10) -> Overload:
    """So many times the sessions that the slots hold, all asking; and how it is before and after."""
    before = await neighbour(server.url, server.honest, 3.0)
    memory = server.memory
    async with crowd(server.url, server.greedy, slots) as full:
        await asyncio.sleep(seconds)
    busy = await _busy(server)
    async with crowd(server.url, server.greedy, times * slots) as many:
        during = await neighbour(server.url, server.honest, seconds)
        grown, busy = server.memory - memory, await _busy(server) - busy
    await asyncio.sleep(1.0)
    after = await neighbour(server.url, server.honest, 3.0)
    return Overload(
        sessions=times * slots,
        capacity_per_second=_rounds(full) / seconds,
        verdicts_per_second=(_rounds(many) + len(during.seconds)) / seconds,
        busy_per_second=busy / seconds,
        p99_ms=during.percentile(0.99),
        megabytes=max(0.0, grown),
        after_p50_ms=after.p50,
        before_p50_ms=before.p50,
        wrong=[*problems(before, during, after), *_of_each([*full, *many])],
    )


def _rounds(crowd: list[Watched]) -> int:
    return sum(len(one.seconds) for one in crowd)


def _of_each(crowd: list[Watched]) -> list[str]:
    return [problem for one in crowd for problem in problems(one)]


async def _busy(server: Server) -> float:
    return sum(count for name, count in (await server.metrics()).items() if 'refusals_total{code="busy"' in name)
