"""The parts of `python -m tests.torture`. Each runs as long as its options say; what it counted, and what was wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from cloud_verifier.settings import Settings
from tests.grammar import corpus
from tests.torture import clients, codes, kills, messages, schemas, sharing, soak
from tests.torture.device import beside, demo_device, megabytes
from tests.torture.fake_verifier import BEHAVIOURS
from tests.torture.forks import mortal
from tests.torture.fuzz import UNBOUNDED, fuzz
from tests.torture.neighbour import neighbour, problems
from tests.torture.neighbours import all_beside
from tests.torture.server import server
from tests.torture.sharing import Found
from tests.torture.tally import Tally

_BATCH, _LANES = 20_000, 4
_BLOWS = {"kills": 20, "cuts": 200}
"""Kills and cuts of a batch."""
_FEW_SLOTS = 16
_SOAKED_SLOTS = 32
"""So few that they are all in use after minutes: then their number has no slope of its own."""
_SHORT = "complete", "verified"
_CLIENTS = 50
_MESSAGES = 2_000


def log_problems(said: str) -> list[str]:
    """Lines that no log should hold."""
    return [line[:2000] for line in said.splitlines() if '"exception"' in line or "Traceback" in line][:3]


def _batches(tally: Tally, count: str, options: argparse.Namespace, size: int) -> Iterator[tuple[int, int]]:
    """How many each batch has, until there are as many as asked for, and its seed: one of its own, also when an earlier
    run is gone on with."""
    while (left := getattr(options, count) - tally.counts[count]) > 0:
        yield min(left, size), options.seed + tally.counts[count]


async def _fuzz(options: argparse.Namespace) -> Found:
    tally = Tally(options.keep, "fuzz")
    async with server(*UNBOUNDED) as running:
        before = await neighbour(running.url, running.honest, 2.0)
        memory, descriptors, said = running.memory, running.descriptors, 0
        for frames, seed in _batches(tally, "frames", options, _BATCH):
            beside = asyncio.create_task(neighbour(running.url, running.honest, 1.0))
            counts = await fuzz(running.port, running.greedy, frames // _LANES + 1, seed, lanes=_LANES)
            wrong = [*problems(before, await beside), *log_problems(running.said[said:])]
            said = len(running.said)
            tally.add(seed, counts, wrong, megabytes=running.memory - memory)
        await asyncio.sleep(3.0)  # what was cut off has been put away
        more = running.descriptors - descriptors
        tally.add(options.seed, {}, [f"{more} descriptors leaked"] if more > 8 else [], descriptors=more)
    return tally.found(), tally.wrong


async def _floods(options: argparse.Namespace) -> Found:
    async with server("--slots", str(_SOAKED_SLOTS), "--openai", "0") as running:
        results = await all_beside(running, options.seconds)
        problems = [problem for one in results for problem in one.problems] + log_problems(running.said)
    return {"floods": results}, problems


async def _shares(options: argparse.Namespace) -> Found:
    found, wrong = {}, []
    for slots in (_FEW_SLOTS, Settings.slots):
        async with server("--slots", str(slots)) as running:
            found[f"{slots} slots"], problems = await sharing.two_principals(running, options.seconds)
            wrong += [*problems, *log_problems(running.said)]
    return found, wrong


async def _overload(options: argparse.Namespace) -> Found:
    async with server("--slots", str(_FEW_SLOTS)) as running:
        found, wrong = await sharing.overload(running, options.seconds, _FEW_SLOTS)
        return found, [*wrong, *log_problems(running.said)]


async def _kills(options: argparse.Namespace) -> Found:
    tally, said = Tally(options.keep, "kills"), 0
    async with mortal() as place:
        while tally.counts["kills"] < options.kills or tally.counts["cuts"] < options.cuts:
            left = {name: getattr(options, name) - tally.counts[name] for name in _BLOWS}
            some = {name: max(0, min(left[name], most)) for name, most in _BLOWS.items()}
            seed = options.seed + sum(tally.counts.values())
            toll = await kills.run(place, **some, seed=seed)
            tally.add(seed, toll.counts, [*toll.wrong, *log_problems(place.said[said:])])
            said = len(place.said)
    return tally.found(), tally.wrong


async def _clients(options: argparse.Namespace) -> Found:
    tally = Tally(options.keep, "clients")
    async with mortal() as place:
        for count, seed in _batches(tally, "kills", options, _CLIENTS):
            with tempfile.TemporaryDirectory() as folder:
                home = clients.Home(Path(folder), place.url)
                counts, wrong = await clients.kill_clients(home, count, seed)
            tally.add(seed, counts, [*wrong, *log_problems(place.said)])
            if not counts["kills"]:
                break
    return tally.found(), tally.wrong


async def _messages(options: argparse.Namespace) -> Found:
    tally, device = Tally(options.keep, "messages"), demo_device()
    for count, seed in _batches(tally, "messages", options, _MESSAGES):
        tally.add(seed, *await messages.fuzz_device(device, count, seed, lanes=_LANES), megabytes=megabytes())
    return tally.found(), tally.wrong


async def _soak(options: argparse.Namespace) -> Found:
    async with server("--slots", str(_SOAKED_SLOTS), "--openai", "0") as running:
        samples = options.out and options.out.with_suffix(".samples")
        soaked = await soak.soak(running, 3600 * options.hours, options.seed, samples)
        problems = [*soaked.toll.wrong[:5], *log_problems(running.said)]
    slopes = soaked.slopes()
    problems += [f"{name} is not flat: {one}" for name, one in slopes.items() if not one.flat]
    problems += [f"no answer was {name} over short connections" for name in _SHORT if not soaked.toll.counts[name]]
    return {"slopes": slopes, "toll": soaked.toll.counts, "hostile": soaked.hostile}, problems


async def _device(options: argparse.Namespace) -> Found:
    outcomes, device = [], demo_device()
    for name in BEHAVIOURS:
        outcomes.append(await beside(name, device))
        print(json.dumps(outcomes[-1], default=vars), flush=True)
    problems = [f"{one.behaviour}: {problem}" for one in outcomes for problem in one.problems]
    return {"outcomes": outcomes}, problems


async def _codes(options: argparse.Namespace) -> Found:
    cells = await codes.table(demo_device())
    return {"cells": cells}, [problem for one in cells for problem in one.problems]


async def _schemas(options: argparse.Namespace) -> Found:
    known = corpus.schemas()
    count = min(len(known), options.schemas)
    checked = await schemas.check([known[n * len(known) // count] for n in range(count)])
    counts = {name: dict(one) for name, one in checked.counts.items()}
    return {"schemas": count, "counts": counts}, checked.wrong[:20]


PARTS: dict[str, Callable[[argparse.Namespace], Awaitable[Found]]] = {
    "fuzz": _fuzz,
    "messages": _messages,
    "floods": _floods,
    "shares": _shares,
    "overload": _overload,
    "kills": _kills,
    "clients": _clients,
    "device": _device,
    "codes": _codes,
    "schemas": _schemas,
    "soak": _soak,
}
