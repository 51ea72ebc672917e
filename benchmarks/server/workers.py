"""`cloud-verifier serve --workers` against one process: devices alone for latency, all together, with connections that
drop, and while one of the workers is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kit.devices import Script, ScriptedDevice, run_all, scripts
from benchmarks.kit.figures import listing
from benchmarks.kit.verifier import Running, verifier
from moa.errors import MoaError

_DROP_EVERY = 3
_THINK = 0.3
"""Seconds between rounds while a verifier is killed, so that answers are still running then."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How many of what."""

    count: int = 2
    """Workers."""
    devices: int = 40
    """Devices at a time."""
    tokens: int = 64
    """Tokens of an answer."""


async def measure(options: Options) -> dict[str, Any]:
    """One plain verifier, then several workers."""
    flags = ("--max-context-tokens=512", "--max-prompt-tokens=256", f"--slots={options.devices + 2}")
    count, drops = options.count, f"connections dropped every {_DROP_EVERY} rounds"
    with verifier(*flags, threads=1) as running:
        said = await scripts(running.url, options.devices, length=32, tokens=options.tokens, rate=0.7, nodes=8)
        runs = await _alone_and_together("one", running.url, said)
    with verifier(f"--workers={count}", *flags, threads=1) as running:
        runs += await _alone_and_together(str(count), running.url, said)
        dropping = await run_all([ScriptedDevice((running.url,), one, drop_every=_DROP_EVERY) for one in said])
        runs.append({"what": f"{count}, {drops}", **dropping})
        runs.append(await _with_a_kill(str(count), running, said))
    return {"count": count, "faults": sum(run["devices"] - run["exact"] for run in runs), "runs": runs}


async def _alone_and_together(name: str, url: str, said: Sequence[Script]) -> list[dict[str, Any]]:
    alone = [await run_all([ScriptedDevice((url,), said[0])]) for _ in range(4)][1:]  # the first one warms
    return [
        {"what": f"{name}, a device alone", **min(alone, key=lambda run: run["round_ms"]["p50"])},
        {"what": f"{name}, all devices", **await run_all([ScriptedDevice((url,), one) for one in said])},
    ]


async def _with_a_kill(name: str, running: Running, said: Sequence[Script]) -> dict[str, Any]:
    devices = [ScriptedDevice((running.url,), one, think=_THINK) for one in said]
    life = asyncio.create_task(run_all(devices))
    while sum(len(device.rounds) > 1 for device in devices) < len(devices):  # every answer is under way
        if life.done():
            raise MoaError("the answers were too short: nothing was under way when a verifier was to be killed")
        await asyncio.sleep(0.05)
    under_way = sum(not device.session.finish for device in devices)
    os.kill(running.workers()[0], signal.SIGKILL)
    return {"what": f"{name}, one killed with {under_way} answers under way", **await life}


def tables(result: Mapping[str, Any]) -> str:
    """One row for each run."""
    return listing(
        result["runs"],
        {
            "verifiers": "{what}",
            "texts equal": "{exact} of {devices}",
            "tokens/s": "{tokens_per_second:.0f}",
            "round p50 / p99 ms": "{round_ms[p50]:.1f} / {round_ms[p99]:.1f}",
            "returns": "{returns}",
            "to the same": lambda run: "-" if run["same_verifier"] is None else f"{run['same_verifier']:.1%}",
            "recovery p50 / p99 ms": lambda run: (
                "{p50:.0f} / {p99:.0f}".format(**run["recovery_ms"]) if run["recovery_ms"] else "-"
            ),
        },
    )
