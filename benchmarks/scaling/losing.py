"""Devices at several verifiers behind one address: alone for latency, all together, with connections that drop, and
while one of the verifiers is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.report import table
from benchmarks.scaling.devices import Device, run_all
from benchmarks.scaling.places import Place, plain, workers
from benchmarks.server.crowd import Speech, speeches
from benchmarks.server_kit import Pair
from moa.errors import MoaError

Figures = dict[str, Any]

_FLAGS = ("--max-context-tokens", "512", "--max-prompt-tokens", "256")
_DROP_EVERY = 3
_THINK = 0.3
"""Seconds between rounds while a verifier is killed, so that answers last long enough to be in its way."""


async def measure(count: int, devices: int, tokens: int) -> Figures:
    """One plain verifier, then `count` workers."""
    flags = (*_FLAGS, "--slots", str(devices + 2))
    with plain(Pair(), *flags) as place:
        said = await speeches(place.url, devices, length=32, tokens=tokens, rate=0.7)
        figures: Figures = {"plain": await _alone_and_together(place, said)}
    with workers(Pair(), count, *flags) as place:
        several = await _alone_and_together(place, said)
        several["drops"] = await run_all([Device(place.url, one, drop_every=_DROP_EVERY) for one in said])
        several["kill"] = await _with_a_kill(place, said)
    return figures | {"count": count, "several": several}


async def _alone_and_together(place: Place, said: Sequence[Speech]) -> Figures:
    await run_all([Device(place.url, said[0])])  # warm
    alone = await run_all([Device(place.url, one) for one in said[:1]])
    for _ in range(2):
        alone = min(alone, await run_all([Device(place.url, said[0])]), key=lambda run: run["round_ms"]["p50"])
    return {"alone": alone, "together": await run_all([Device(place.url, one) for one in said])}


async def _with_a_kill(place: Place, said: Sequence[Speech]) -> Figures:
    devices = [Device(place.url, one, think=_THINK) for one in said]
    running = asyncio.create_task(run_all(devices))
    while sum(len(device.round_ms) > 1 for device in devices) < len(devices):  # every answer is under way
        if running.done():
            raise MoaError("the answers were too short: nothing was under way when a verifier was to be killed")
        await asyncio.sleep(0.05)
    open_answers = sum(not device.session.finish for device in devices)
    place.kill_one()
    return {"under_way": open_answers, **await running}


def table_of(figures: Figures) -> str:
    """One row for each run."""
    several, count = figures["several"], figures["count"]
    named = [
        ("one, a device alone", figures["plain"]["alone"]),
        ("one, all devices", figures["plain"]["together"]),
        (f"{count}, a device alone", several["alone"]),
        (f"{count}, all devices", several["together"]),
        (f"{count}, connections dropped every {_DROP_EVERY} rounds", several["drops"]),
        (f"{count}, one killed with {several['kill']['under_way']} answers under way", several["kill"]),
    ]
    header = (
        "verifiers",
        "texts equal",
        "tokens/s",
        "round p50 / p99 ms",
        "returns",
        "to the same",
        "recovery p50 / p99 ms",
    )
    return table(header, [_row(name, run) for name, run in named])


def _row(name: str, run: Figures) -> list[str]:
    recovery, same = run["recovery_ms"], run["same_verifier"]
    return [
        name,
        f"{run['exact']} of {run['devices']}",
        f"{run['tokens_per_second']:.0f}",
        f"{run['round_ms']['p50']:.1f} / {run['round_ms']['p99']:.1f}",
        str(run["returns"]),
        "-" if same is None else f"{same:.1%}",
        "-" if recovery is None else f"{recovery['p50']:.0f} / {recovery['p99']:.0f}",
    ]
