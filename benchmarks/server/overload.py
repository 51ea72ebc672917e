"""Ten times more clients than there is room for: typed refusals, bounded memory, and everybody served in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from typing import Any

from benchmarks.report import table
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, ServerProcess, client, prompt, server
from moa.errors import MoaError
from moa.wire import ClientSession
from moa.wire.events import Refused

Figures = dict[str, Any]
_SLOTS = 8
_TIMES = 10
_TOKENS = 8
_QUEUE = 4
_TIGHT = ("--slots", str(_SLOTS), "--max-queue", str(_QUEUE), "--idle-seconds", "0.2")


async def measure(pair: Pair, options: Options) -> Figures:
    """All clients at once, each until it has its text."""
    clients = _TIMES * _SLOTS
    with server(pair, *options.flags, *_TIGHT, threads=options.threads) as process:
        await asyncio.gather(*(_insist(process.url, seed, Counter()) for seed in range(_SLOTS)))  # warm
        before = process.memory()
        refusals: Counter[str] = Counter()
        peak = [before]
        watch = asyncio.create_task(_watch(process, peak))
        started = time.perf_counter()
        await asyncio.gather(*(_insist(process.url, seed, refusals) for seed in range(clients)))
        seconds = time.perf_counter() - started
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        return {
            "clients": clients,
            "slots": _SLOTS,
            "served": clients,
            "refusals": dict(refusals),
            "seconds": round(seconds, 1),
            "rss_mib": {"before": round(before / 2**20, 1), "highest": round(max(peak) / 2**20, 1)},
        }


async def _watch(process: ServerProcess, peak: list[int]) -> None:
    while True:
        peak.append(process.memory())
        await asyncio.sleep(0.05)


async def _insist(url: str, seed: int, refusals: Counter[str]) -> None:
    rng = random.Random(seed)
    async with client(url) as edge:
        session = ClientSession(prompt(seed, 16, edge.welcome.vocab_size), max_new_tokens=_TOKENS, ignore_eos=True)
        session.open()
        while not session.finish:
            if not session.unsettled:
                session.verify([session.log[-1], 5, 6])
            await edge.send(*session.unsettled)
            event = await edge.event(session)
            if isinstance(event, Refused):
                if not event.retry:
                    raise MoaError(f"refused for good: {event.error}")
                refusals[f"{event.error.code}, limit {event.error.limit}"] += 1
                await asyncio.sleep(event.retry_after * rng.uniform(0.5, 1.5))
        await edge.send(session.close())


def tables(figures: Figures) -> str:
    """What was refused and held."""
    rss = figures["rss_mib"]
    rows = [
        ["served to the end", f"{figures['served']}"],
        *([f"refused with `{kind}`", f"{count}"] for kind, count in figures["refusals"].items()),
        ["seconds", f"{figures['seconds']}"],
        ["RSS before, highest, MiB", f"{rss['before']} / {rss['highest']}"],
    ]
    return table([f"{figures['clients']} clients, {figures['slots']} slots, a queue of {_QUEUE}", ""], rows)
