"""Two principals, one of them above its share; and a load of ten times the capacity."""

from __future__ import annotations

import argparse
import asyncio

from cloud_verifier.settings import Settings
from tests.torture.neighbour import Watched, crowd, neighbour, problems
from tests.torture.server import Server, server
from tests.torture.tally import Found

_SLOTS = 16
_SESSIONS = 48
_TIMES = 10
_LEAST_SHARE = 0.4
_LONGEST_WAIT = 2.0
_MOST_MEGABYTES = 100
_SLOWER_AFTERWARDS = 3


async def two_principals(options: argparse.Namespace) -> Found:
    """One alone, then beside a greedy one that already has every slot: on few slots, and on as many
    as there are."""
    found = {}
    wrong = list[str]()
    for slots in (_SLOTS, Settings.slots):
        async with server("--slots", str(slots)) as running:
            alone = await neighbour(running.url, running.honest, options.seconds)
            async with crowd(running.url, running.greedy, _SESSIONS) as greedy:
                await asyncio.sleep(3.0)
                beside = await neighbour(running.url, running.honest, options.seconds)
            share = len(beside.seconds) / max(1, len(alone.seconds))
            wrong += [*problems(alone, beside), *_of_each(greedy)][:3]
            wrong += (
                [] if share >= _LEAST_SHARE else [f"{share:.0%} of the rounds that it gets alone"]
            )
            wrong += (
                []
                if beside.admitted <= _LONGEST_WAIT
                else [f"admitted after {beside.admitted:.1f} s"]
            )
            wrong += running.complaints()
        rounds = {
            "alone": len(alone.seconds),
            "beside": len(beside.seconds),
            "greedy": _rounds(greedy),
        }
        found[f"{slots} slots"] = {**rounds, "share": share, "admitted": beside.admitted}
    return found, wrong


async def overload(options: argparse.Namespace) -> Found:
    """So many times the sessions that the slots hold, all asking; and how it is before and after."""
    async with server("--slots", str(_SLOTS)) as running:
        before = await neighbour(running.url, running.honest, 3.0)
        memory = running.memory
        async with crowd(running.url, running.greedy, _SLOTS) as full:
            await asyncio.sleep(options.seconds)
        busy = await _busy(running)
        async with crowd(running.url, running.greedy, _TIMES * _SLOTS) as many:
            during = await neighbour(running.url, running.honest, options.seconds)
            grown = max(0.0, running.memory - memory)
            busy = await _busy(running) - busy
        await asyncio.sleep(1.0)
        after = await neighbour(running.url, running.honest, 3.0)
        complaints = running.complaints()
    wrong = [*problems(before, during, after), *_of_each([*full, *many])][:3]
    if after.p50 > _SLOWER_AFTERWARDS * before.p50:
        wrong.append(f"afterwards a round takes {after.p50:.0f} ms, before {before.p50:.0f}")
    wrong += [f"{grown:.0f} MB"] if grown > _MOST_MEGABYTES else []
    wrong += complaints
    return {
        "sessions": _TIMES * _SLOTS,
        "verdicts a second when as many ask as can be served": _rounds(full) / options.seconds,
        "verdicts a second": (_rounds(many) + len(during.seconds)) / options.seconds,
        "busy a second": busy / options.seconds,
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
    return sum(
        count
        for name, count in (await server.metrics()).items()
        if 'refusals_total{code="busy"' in name
    )
