"""`make torture`: every part, as long as it is told to take. Each part prints what it found, and fails when it must.

python -m tests.torture                                  minutes: a bit of everything
python -m tests.torture --full                           the counts of docs/reliability.md: hours
python -m tests.torture fuzz --frames 100000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.torture import kills, sharing, soak
from tests.torture.device import beside, demo_device
from tests.torture.fake_verifier import BEHAVIOURS
from tests.torture.fuzz import UNBOUNDED, fuzz, seed_from_clock
from tests.torture.neighbour import neighbour, same_text
from tests.torture.neighbours import all_floods
from tests.torture.server import server
from tests.torture.tally import Tally

_FULL = {"frames": 2_000_000, "kills": 1000, "cuts": 10_000, "seconds": 20.0, "hours": 2.0}
_SHORT = {"frames": 20_000, "kills": 20, "cuts": 200, "seconds": 5.0, "hours": 0.05}
_BATCH, _LANES = 20_000, 4
_BLOWS = 20, 200
"""Kills and cuts of a batch."""
_PARTS = ("fuzz", "floods", "shares", "overload", "kills", "device", "soak")


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="the counts of docs/reliability.md: hours")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep counts there, and go on where they stand")
    parser.add_argument("--out", type=Path, default=None, help="write what was found as JSON")
    for name, value in _SHORT.items():
        parser.add_argument(f"--{name}", type=type(value), default=None)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    for name, value in (_FULL if options.full else _SHORT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.seed = seed_from_clock() if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    found, wrong = asyncio.run(_run(options))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit("\n".join(wrong) if wrong else 0)


async def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {"seed": options.seed}
    wrong: list[str] = []
    for part in options.parts or _PARTS:
        began = time.monotonic()
        result, problems = await _RUN[part](options)
        found[part] = result | {"seconds": round(time.monotonic() - began, 1)}
        wrong += [f"{part}: {problem}" for problem in problems]
        print(part, json.dumps(found[part]), *problems, sep="\n  ", flush=True)
    return found, wrong


def log_problems(said: str) -> list[str]:
    """Lines that no log should hold."""
    return [line[:2000] for line in said.splitlines() if '"exception"' in line or "Traceback" in line][:3]


async def _fuzz(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    tally = Tally(options.keep, "fuzz")
    async with server(*UNBOUNDED) as running:
        before = await neighbour(running.port, running.honest, 2.0)
        memory, descriptors, said = running.memory, running.descriptors, 0
        while (left := options.frames - tally.counts["frames"]) > 0:
            beside = asyncio.create_task(neighbour(running.port, running.honest, 1.0))
            seed = options.seed + tally.counts["frames"]  # a batch of its own, also when an earlier run is gone on with
            counts = await fuzz(running.port, running.greedy, min(left, _BATCH) // _LANES + 1, seed, lanes=_LANES)
            texts = [*before.texts, *(await beside).texts]
            wrong = [] if same_text(texts) else [f"batch {seed}: the neighbour's text changed"]
            wrong += [f"batch {seed}: {problem}" for problem in log_problems(running.said[said:])]
            said = len(running.said)
            tally.add(counts, wrong, megabytes=running.memory - memory)
        await asyncio.sleep(3.0)  # what was cut off has been put away
        more = running.descriptors - descriptors
        tally.add({}, [f"{more} descriptors leaked"] if more > 8 else [], descriptors=more)
    return tally.found(), tally.wrong


async def _floods(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with server() as running:
        results = await all_floods(running, options.seconds, [])
        problems = [f"{one.flood}: the neighbour's text changed" for one in results if not one.right]
        problems += [f"{one.flood}: {one.megabytes:.0f} MB" for one in results if one.megabytes > 100]
        log = len(running.said)
        problems += log_problems(running.said)
    return {"floods": [dataclasses.asdict(one) for one in results], "log_bytes": log}, problems


async def _shares(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with server() as running:
        shares = await sharing.two_principals(running, options.seconds)
    problems = [] if shares.share >= 0.4 else [f"{shares.share:.0%} of the rounds that it gets alone"]
    problems += [] if shares.admitted <= 2.0 else [f"admitted after {shares.admitted:.1f} s"]
    return dataclasses.asdict(shares), problems


async def _overload(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with server() as running:
        result = await sharing.overload(running, options.seconds, sessions=160)
        return dataclasses.asdict(result), log_problems(running.said)


async def _kills(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    tally, said = Tally(options.keep, "kills"), 0
    counted = ("kills", "cuts", "answers", "reopened")
    async with kills.nursery() as place:
        while tally.counts["kills"] < options.kills or tally.counts["cuts"] < options.cuts:
            left = [options.kills - tally.counts["kills"], options.cuts - tally.counts["cuts"]]
            some = [max(0, min(a, b)) for a, b in zip(left, _BLOWS, strict=True)]
            seed = options.seed + sum(tally.counts.values())
            toll = await kills.run(place, kills=some[0], cuts=some[1], seed=seed)
            wrong = [f"batch {seed}: {problem}" for problem in [*toll.wrong, *log_problems(place.said[said:])]]
            said = len(place.said)
            tally.add({name: getattr(toll, name) for name in counted}, wrong)
    return tally.found(), tally.wrong


async def _soak(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    async with server() as running:
        samples = options.out and options.out.with_suffix(".samples")
        soaked = await soak.soak(running, 3600 * options.hours, options.seed, samples)
        problems = [*soaked.toll.wrong[:5], *log_problems(running.said)]
    slopes = soaked.slopes()
    problems += [f"{name} is not flat: {one}" for name, one in slopes.items() if not one.flat]
    found = {name: dataclasses.asdict(one) for name, one in slopes.items()}
    return {"slopes": found, "toll": dataclasses.asdict(soaked.toll), "hostile": dict(soaked.hostile)}, problems


async def _device(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    outcomes, device = [], demo_device()
    for name in BEHAVIOURS:
        outcomes.append(await beside(name, device))
        print(outcomes[-1].row(), flush=True)
    problems = [f"{one.behaviour}: {problem}" for one in outcomes for problem in one.problems]
    return {"outcomes": [dataclasses.asdict(one) for one in outcomes]}, problems


_RUN = {
    "fuzz": _fuzz,
    "floods": _floods,
    "shares": _shares,
    "overload": _overload,
    "kills": _kills,
    "device": _device,
    "soak": _soak,
}

if __name__ == "__main__":
    main()
