"""Endurance: thousands of sessions opened and dropped, ten times too many clients, and a stop under load."""

from __future__ import annotations

import asyncio
import contextlib
from statistics import linear_regression
from typing import Any

from benchmarks.kit.devices import ScriptedDevice, prompt, run_all, scripts
from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.kit.verifier import Pair, verifier
from benchmarks.server.crowd import scripts_for
from benchmarks.server.scrape import look
from tests.support.client import client

Figures = dict[str, Any]
_SLOTS = 16
_AT_ONCE = 8
_SAMPLES = 100
# Sessions that are not closed lose their slots at once if others want them, and are removed within seconds.
_TIMES = ("--idle-seconds=0.01", "--detached-seconds=1", "--cold-seconds=1")
_FORGOTTEN = 5.0
_FEW, _OVER, _QUEUE = 8, 10, 4
"""Slots, clients for each of them, and places in the queue where there are too many clients."""
_MOVING = 8
_THINK = 0.02
"""Seconds that a client takes between two rounds."""
_HEARD = 0.3
"""Of its text, by the first client to have so much: then the verifier is told to stop."""


async def measure_sessions(pair: Pair, options: Any) -> Figures:
    """Open, use and drop sessions; a third of them without a word."""
    every = max(1, options.sessions // _SAMPLES // _AT_ONCE)
    memory: list[tuple[int, int]] = []
    with verifier(f"--slots={_SLOTS}", *_TIMES, pair=pair) as running:
        idle = running.stats.num_fds()
        rounds = -(-options.sessions // _AT_ONCE)
        progress = Progress(rounds, f"times {_AT_ONCE} sessions")
        for number in range(1, rounds + 1):
            done = number * _AT_ONCE
            await asyncio.gather(*(_open_and_drop(running.url, done - i) for i in range(_AT_ONCE)))
            if number % every == 0 or number == rounds:
                memory.append((done, running.stats.memory_info().rss))
            progress.step()
        await asyncio.sleep(_FORGOTTEN)
        left, page = running.stats.num_fds(), await look(running.url)
    half = memory[len(memory) // 2 :]
    slope = linear_regression(*zip(*half, strict=True)).slope if len(half) > 1 else 0.0
    sizes = {"first": memory[0], "middle": half[0], "last": memory[-1], "highest": max(memory, key=lambda one: one[1])}
    return {
        "sessions": done,
        "opened": int(page["moa_session_opens_total"]),
        "rss_mib": {name: round(size / 2**20, 1) for name, (_, size) in sizes.items()},
        "rss_bytes_per_session_second_half": round(slope, 1),
        "slots_in_use": _SLOTS - int(page["moa_slots_free"]),
        "sessions_held": int(sum(n for name, n in page.items() if name.startswith("moa_sessions{"))),
        "connections": int(page["moa_connections"]),
        "descriptors": {"before": idle, "after": left},
    }


async def _open_and_drop(url: str, seed: int) -> None:
    async with client(url) as edge:
        ids = prompt(seed, 16, edge.welcome.vocab_size)
        session = await edge.start(ids, patient=True, max_new_tokens=8, records="int8")
        if seed % 2:
            await edge.advance(session, [session.log[-1]])
        if seed % 3:
            await edge.send(session.close())
        else:
            edge.connection.transport.abort()


def session_tables(figures: Figures) -> str:
    """Before and after."""
    rows = [
        ["RSS at first, at half, at the end, highest, MiB", " / ".join(map(str, figures["rss_mib"].values()))],
        ["slope of the second half, bytes a session", f"{figures['rss_bytes_per_session_second_half']}"],
        ["slots in use afterwards", f"{figures['slots_in_use']} of {_SLOTS}"],
        ["sessions held, connections", "{sessions_held}, {connections}".format(**figures)],
        ["descriptors before, after", "{before}, {after}".format(**figures["descriptors"])],
    ]
    told = f"{_AT_ONCE} at a time; half of them verify, a third of them vanish without a word."
    shown = table([f"{figures['opened']} sessions", ""], rows)
    return f"{shown}\n\n{told}"


async def measure_overload(pair: Pair, options: Any) -> Figures:
    """All clients at once, each until it has its text, with typed refusals and bounded memory."""
    tight = (f"--slots={_FEW}", f"--max-queue={_QUEUE}", "--idle-seconds=0.2")
    with verifier(*tight, pair=pair) as running:
        said = []
        for _ in range(_OVER):  # as many at a time as there is room for
            said += await scripts(running.url, _FEW, length=16, tokens=8, rate=0.5, nodes=3)
        memory = [running.stats.memory_info().rss]

        async def watch() -> None:
            while True:
                memory.append(running.stats.memory_info().rss)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        devices = [ScriptedDevice((running.url,), script) for script in said]
        found = await run_all(devices)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return {
        "clients": len(devices),
        "slots": _FEW,
        "served": found["exact"],
        "refusals": {name: count for name, count in found["outcomes"].items() if name != "goaway"},
        "seconds": found["seconds"],
        "rss_mib": {"before": round(memory[0] / 2**20, 1), "highest": round(max(memory) / 2**20, 1)},
    }


def overload_tables(figures: Figures) -> str:
    """What was refused and held."""
    rows = [
        ["served to the end", f"{figures['served']}"],
        *([f"refused with `{kind}`", f"{count}"] for kind, count in figures["refusals"].items()),
        ["seconds", f"{figures['seconds']}"],
        ["RSS before, highest, MiB", "{before} / {highest}".format(**figures["rss_mib"])],
    ]
    return table([f"{figures['clients']} clients, {figures['slots']} slots, a queue of {_QUEUE}", ""], rows)


async def measure_stop(pair: Pair, options: Any) -> Figures:
    """Two replicas; the first is told to stop while all of its clients are in the middle of their texts: everybody
    gets a goaway, resumes on the other one, and ends with the same text."""
    with verifier(pair=pair) as first, verifier(pair=pair) as second:
        said = await scripts_for(second.url, _MOVING, options)
        devices = [ScriptedDevice((first.url, second.url), script, think=_THINK) for script in said]

        async def stop() -> None:
            while max(len(device.tokens) for device in devices) < _HEARD * options.tokens:
                await asyncio.sleep(0.005)
            first.process.terminate()

        await asyncio.gather(run_all(devices), stop())
        code = await asyncio.to_thread(first.process.wait, 60)
    return {
        "clients": len(devices),
        "goaway": sum(device.outcomes["goaway"] > 0 for device in devices),
        "moved": sum(len(set(device.instances)) > 1 for device in devices),
        "identical": sum(device.exact for device in devices),
        "exit_code": code,
    }


def stop_tables(figures: Figures) -> str:
    """How many came through."""
    names = {"goaway": "got a goaway", "moved": "went on elsewhere", "identical": "ended with the target's own text"}
    rows = [[says, f"{figures[name]} of {figures['clients']}"] for name, says in names.items()]
    return table(["SIGTERM under load", ""], [*rows, ["exit code of the stopped verifier", f"{figures['exit_code']}"]])
