"""The verifier on Ray Serve against one plain process: the same texts, latency, returns to the same replica, a replica
killed, and 1 -> 3 -> 1 replicas under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kit.devices import Script, ScriptedDevice, run_all, scripts
from benchmarks.kit.figures import percentiles
from benchmarks.kit.progress import say
from benchmarks.kit.serving import Serving, serving
from benchmarks.kit.verifier import verifier
from benchmarks.server import workers
from moa.errors import MoaError

_DROP_EVERY = 3
_THINK = 0.5
"""Seconds between rounds of answers that should last while replicas come and go."""
_REST = 4.0
"""The same, while there should be no load."""
_PATIENCE = 300.0
_SCALING = {"look_back_period_s": 4, "metrics_interval_s": 1, "upscale_delay_s": 2, "downscale_delay_s": 6}
"""Quicker than a service would want it, so that it can be watched."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How many of what."""

    replicas: int = 3
    devices: int = 40
    """Devices at a time."""
    tokens: int = 64
    """Tokens of an answer."""
    passes: int = 8
    """Answers of a device alone at each of both, in turn."""


async def measure(options: Options) -> dict[str, Any]:
    """A fixed number of replicas beside a plain verifier, then a number that follows the load."""
    limits = {"max_context_tokens": 1024, "max_prompt_tokens": 256, "slots": options.devices + 40}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    fixed = {"num_replicas": options.replicas, "autoscaling_config": None}
    say("plain and Ray Serve, in turn")
    with verifier(*flags, threads=1) as plain, serving(limits, fixed) as served:
        said = await scripts(plain.url, options.devices, length=32, tokens=options.tokens, rate=0.7, nodes=8)
        long = await scripts(plain.url, options.devices, length=32, tokens=6 * options.tokens, rate=0.7, nodes=8)
        runs = await _alone({"plain": plain.url, "Serve": served.url}, said, options.passes)
        runs.append({"what": "plain, all devices", **await _all(plain.url, said)})
        runs.append({"what": f"Serve, {options.replicas} replicas, all devices", **await _all(served.url, said)})
        dropped = await _all(served.url, said, drop_every=_DROP_EVERY)
        runs.append({"what": f"Serve, connections dropped every {_DROP_EVERY} rounds", **dropped})
        runs.append(await _with_a_kill(served, said))
    say("as many replicas as the load wants")
    scaling = _SCALING | {"min_replicas": 1, "max_replicas": options.replicas, "policy": _POLICY}
    with serving(limits, {"autoscaling_config": scaling, "graceful_shutdown_timeout_s": 2}) as served:
        runs.append(await _there_and_back(served, said, long, options.replicas))
    return {"replicas": options.replicas, "runs": runs}


_POLICY = {"policy_function": "cloud_verifier.ray_serve:wanted"}


async def _all(url: str, said: Iterable[Script], **how: Any) -> dict[str, Any]:
    return await run_all([ScriptedDevice((url,), one, **how) for one in said])


async def _alone(urls: Mapping[str, str], said: Sequence[Script], passes: int) -> list[dict[str, Any]]:
    """A device alone: both in turn, so that whatever else the machine does meets both."""
    devices: dict[str, list[ScriptedDevice]] = {name: [] for name in urls}
    runs = {}
    for one in range(passes + 1):
        for name, url in urls.items():
            device = ScriptedDevice((url,), said[one % len(said)])
            runs[name] = await run_all([device])
            devices[name] += [device] if one else []  # the first one warms
    rounds = {name: [1000 * (r.read - r.sent) for d in there for r in d.rounds] for name, there in devices.items()}
    exact = {name: sum(device.exact for device in there) for name, there in devices.items()}
    return [
        {"what": f"{name}, a device alone", **runs[name]}
        | {"devices": passes, "exact": exact[name], "round_ms": percentiles(rounds[name])}
        for name in urls
    ]


async def _with_a_kill(served: Serving, said: Sequence[Script]) -> dict[str, Any]:
    devices = [ScriptedDevice((served.url,), one, think=_THINK) for one in said]
    async with _all_under_way(devices) as life:
        under_way = _unfinished(devices)
        os.kill(served.processes()[0], signal.SIGKILL)
    return {"what": f"Serve, a replica killed with {under_way} answers under way", **await life}


async def _there_and_back(served: Serving, said: Sequence[Script], long: Sequence[Script], most: int) -> dict[str, Any]:
    """Long answers are under way all the time; short ones load the verifier until there are `most` replicas."""
    devices = [ScriptedDevice((served.url,), one, think=_REST) for one in long]
    async with _all_under_way(devices) as life:
        crowd = [asyncio.create_task(_again_and_again(served.url, one)) for one in said]
        await asyncio.to_thread(served.wait, most, _PATIENCE)
        say(f"{most} replicas, {_unfinished(devices)} answers under way")
        for device in devices:  # their sessions go to whom they belong to now
            device.drop_every = 8
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)
        await asyncio.to_thread(served.wait, 1, _PATIENCE)
        under_way = _unfinished(devices)
        say(f"1 replica, {under_way} answers under way")
        for device in devices:
            device.think = 0.0
    return {"what": f"Serve, 1, {most} and 1 replicas, then {under_way} answers under way", **await life}


@contextlib.asynccontextmanager
async def _all_under_way(devices: Sequence[ScriptedDevice]) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
    """Devices that have all begun to get their answers; none may have got all of it at the end of the context."""
    life = asyncio.create_task(run_all(devices))
    while sum(len(device.rounds) > 1 for device in devices) < len(devices) and not life.done():
        await asyncio.sleep(0.05)
    yield life
    if life.done():
        raise life.exception() or MoaError("the answers were too short: all had ended before")


def _unfinished(devices: Iterable[ScriptedDevice]) -> int:
    return sum(not device.session.finish for device in devices)


async def _again_and_again(url: str, script: Script) -> None:
    while True:
        await ScriptedDevice((url,), script).run()


def tables(result: Mapping[str, Any]) -> str:
    """One row for each run, and what Serve adds to a round."""
    plain, served = (run["round_ms"] for run in result["runs"][:2])
    added = " / ".join(f"{served[share] - plain[share]:.1f}" for share in ("p50", "p99"))
    return f"{workers.tables(result)}\n\nServe adds {added} ms to a round of a device alone (p50 / p99)."


def faults(result: Mapping[str, Any]) -> str:
    """Texts that are not the target's own."""
    return "" if all(run["exact"] == run["devices"] for run in result["runs"]) else "a text is not the target's own"
