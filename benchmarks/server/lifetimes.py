"""Many sessions opened and dropped: memory, descriptors and slots must come back to where they were."""

from __future__ import annotations

import asyncio
import sys
from statistics import linear_regression
from typing import Any

from benchmarks.report import table
from benchmarks.server.options import Options
from benchmarks.server.scrape import look
from benchmarks.server_kit import Pair, client, prompt, server
from moa.wire import ClientSession

Figures = dict[str, Any]
_SLOTS = 16
_AT_ONCE = 8
_SAMPLES = 100
# Sessions that nobody closes give their slots back at once where others want them, and are forgotten within seconds.
_TIMES = ("--idle-seconds", "0.01", "--detached-seconds", "1", "--cold-seconds", "1")
_FORGOTTEN = 5.0


async def measure(pair: Pair, options: Options) -> Figures:
    """Open, use and drop sessions; a third of them without a word."""
    every = max(_AT_ONCE, options.sessions // _SAMPLES)
    with server(pair, "--slots", str(_SLOTS), *_TIMES, *options.flags, threads=options.threads) as process:
        idle = process.descriptors()
        memory: list[tuple[int, int]] = []
        done = 0
        while done < options.sessions:
            await asyncio.gather(*(_open_and_drop(process.url, done + i) for i in range(_AT_ONCE)))
            done += _AT_ONCE
            if done // every > (done - _AT_ONCE) // every or done >= options.sessions:
                memory.append((done, process.memory()))
                if len(memory) % 10 == 0:
                    print(f"{done} sessions, {memory[-1][1] / 2**20:.1f} MiB", file=sys.stderr, flush=True)
        await asyncio.sleep(_FORGOTTEN)
        left = process.descriptors()
        page = await look(process.url)
        half = memory[len(memory) // 2 :]
        slope = linear_regression(*zip(*half, strict=True)).slope if len(half) > 1 else 0.0
        return {
            "sessions": done,
            "opened": int(page["moa_session_opens_total"]),
            "rss_mib": {
                "first": round(memory[0][1] / 2**20, 1),
                "middle": round(half[0][1] / 2**20, 1),
                "last": round(memory[-1][1] / 2**20, 1),
                "highest": round(max(size for _, size in memory) / 2**20, 1),
            },
            "rss_bytes_per_session_second_half": round(slope, 1),
            "slots_in_use": _SLOTS - int(page["moa_slots_free"]),
            "sessions_held": int(sum(n for name, n in page.items() if name.startswith("moa_sessions{"))),
            "connections": int(page["moa_connections"]),
            "descriptors": {"before": idle, "after": left},
        }


async def _open_and_drop(url: str, seed: int) -> None:
    async with client(url) as edge:
        session = ClientSession(prompt(seed, 16, edge.welcome.vocab_size), max_new_tokens=8, records="int8")
        await edge.start(session)
        if seed % 2:
            await edge.advance(session, [session.log[-1]])
        if seed % 3:
            await edge.send(session.close())
        else:
            edge.connection.transport.abort()


def tables(figures: Figures) -> str:
    """Before and after."""
    rss = figures["rss_mib"]
    return "\n".join(
        [
            table(
                [f"{figures['opened']} sessions", ""],
                [
                    [
                        "RSS at first, at half, at the end, highest, MiB",
                        " / ".join(f"{v}" for v in rss.values()),
                    ],
                    ["slope of the second half, bytes a session", f"{figures['rss_bytes_per_session_second_half']}"],
                    ["slots in use afterwards", f"{figures['slots_in_use']} of {_SLOTS}"],
                    ["sessions held, connections", f"{figures['sessions_held']}, {figures['connections']}"],
                    ["descriptors before, after", "{before}, {after}".format(**figures["descriptors"])],
                ],
            ),
            "",
            f"{_AT_ONCE} at a time; half of them verify, a third of them vanish without a word.",
        ]
    )
