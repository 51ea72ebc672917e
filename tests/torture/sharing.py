"""Two principals, one of them above its share; and a load of ten times the capacity."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.torture.neighbour import Watched, crowd, neighbour, problems
from tests.torture.server import Server

Found = tuple[dict[str, Any], list[str]]
"""What was counted, and what was wrong."""
_SESSIONS, _TIMES = 48, 10
_LEAST_SHARE, _LONGEST_WAIT = 0.4, 2.0
_MOST_MEGABYTES, _SLOWER_AFTERWARDS = 100, 3


async def two_principals(server: Server, seconds: float) -> Found:
    """One alone, then beside a greedy one that already has every slot."""
    alone = await neighbour(server.url, server.honest, seconds)
    async with crowd(server.url, server.greedy, _SESSIONS) as greedy:
        await asyncio.sleep(3.0)
        beside = await neighbour(server.url, server.honest, seconds)
    share = len(beside.seconds) / max(1, len(alone.seconds))
    wrong = [*problems(alone, beside), *_of_each(greedy)][:3]
    wrong += [] if share >= _LEAST_SHARE else [f"{share:.0%} of the rounds that it gets alone"]
    wrong += [] if beside.admitted <= _LONGEST_WAIT else [f"admitted after {beside.admitted:.1f} s"]
    rounds = {"alone": len(alone.seconds), "beside": len(beside.seconds), "greedy": _rounds(greedy)}
    return {**rounds, "share": share, "admitted": beside.admitted}, wrong


async def overload(server: Server, seconds: float, slots: int) -> Found:
    """So many times the sessions that the slots hold, all asking; and how it is before and after."""
    before, memory = await neighbour(server.url, server.honest, 3.0), server.memory
    async with crowd(server.url, server.greedy, slots) as full:
        await asyncio.sleep(seconds)
    busy = await _busy(server)
    async with crowd(server.url, server.greedy, _TIMES * slots) as many:
        during = await neighbour(server.url, server.honest, seconds)
        grown, busy = max(0.0, server.memory - memory), await _busy(server) - busy
    await asyncio.sleep(1.0)
    after = await neighbour(server.url, server.honest, 3.0)
    wrong = [*problems(before, during, after), *_of_each([*full, *many])][:3]
    if after.p50 > _SLOWER_AFTERWARDS * before.p50:
        wrong.append(f"afterwards a round takes {after.p50:.0f} ms, before {before.p50:.0f}")
    wrong += [f"{grown:.0f} MB"] if grown > _MOST_MEGABYTES else []
    return {
        "sessions": _TIMES * slots,
        "verdicts a second when as many ask as can be served": _rounds(full) / seconds,
        "verdicts a second": (_rounds(many) + len(during.seconds)) / seconds,
        "busy a second": busy / seconds,
        "p99 of a neighbour, ms": during.percentile(0.99),
        "p50 before, ms": before.p50,
        "p50 after, ms": after.p50,
        "megabytes": grown,
    }, wrong


def _rounds(crowd: list[Watched]) -> int:
    return sum(len(one.seconds) for one in crowd)


def _of_each(crowd: list[Watched]) -> list[str]:
    return [problem for one in crowd for problem in problems(one)]


async def _busy(server: Server) -> float:
    return sum(count for name, count in (await server.metrics()).items() if 'refusals_total{code="busy"' in name)
