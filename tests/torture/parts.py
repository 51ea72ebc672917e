"""The parts of `python -m tests.torture`. Each runs as long as its options say; what it counted,
and what was wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.grammar import corpus
from tests.torture import clients, codes, kills, messages, schemas, sharing
from tests.torture.bundles import bundles
from tests.torture.costs import costs
from tests.torture.device import beside, demo_device, megabytes
from tests.torture.fake_verifier import BEHAVIOURS
from tests.torture.files import files
from tests.torture.fuzz import UNBOUNDED, fuzz
from tests.torture.guesses import guessing
from tests.torture.honest import honest
from tests.torture.neighbour import neighbour, problems
from tests.torture.neighbours import all_beside
from tests.torture.sampling import sampling
from tests.torture.schema_table import table
from tests.torture.server import mortal, server
from tests.torture.soak import soak
from tests.torture.stops import stops
from tests.torture.tally import Found, Tally
from tests.torture.thousand import thousand

_LANES = 4


async def _fuzz(options: argparse.Namespace) -> Found:
    tally = Tally(options, "fuzz", frames=20_000)
    async with server(*UNBOUNDED) as running:
        before = await neighbour(running.url, running.honest, 2.0)
        memory = running.memory
        descriptors = running.descriptors
        for seed, batch in tally.batches():
            beside = asyncio.create_task(neighbour(running.url, running.honest, 1.0))
            counts = await fuzz(
                running.port, running.greedy, batch["frames"] // _LANES + 1, seed, lanes=_LANES
            )
            wrong = [*problems(before, await beside), *running.complaints()]
            tally.add(seed, counts, wrong, megabytes=running.memory - memory)
        await asyncio.sleep(3.0)  # what was cut off has been put away
        more = running.descriptors - descriptors
        tally.add(
            options.seed, {}, [f"{more} descriptors leaked"] if more > 8 else [], descriptors=more
        )
    return tally.found


async def _kills(options: argparse.Namespace) -> Found:
    tally = Tally(options, "kills", kills=20, cuts=200)
    async with mortal() as place:
        for seed, batch in tally.batches():
            toll = await kills.run(place, **batch, seed=seed)
            tally.add(seed, toll.counts, [*toll.wrong, *place.complaints()])
    return tally.found


async def _clients(options: argparse.Namespace) -> Found:
    tally = Tally(options, "clients", kills=50)
    async with mortal() as place:
        for seed, batch in tally.batches():
            with tempfile.TemporaryDirectory() as folder:
                home = clients.Home(Path(folder), place.url)
                counts, wrong = await clients.kill_clients(home, seed=seed, **batch)
            tally.add(seed, counts, [*wrong, *place.complaints()])
            if not counts["kills"]:
                break
    return tally.found


async def _messages(options: argparse.Namespace) -> Found:
    tally = Tally(options, "messages", messages=2_000)
    device = demo_device()
    for seed, batch in tally.batches():
        counts, wrong = await messages.fuzz_device(device, seed=seed, lanes=_LANES, **batch)
        tally.add(seed, counts, wrong, megabytes=megabytes())
    return tally.found


async def _device(options: argparse.Namespace) -> Found:
    outcomes = []
    device = demo_device()
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
    "guesses": guessing,
    "messages": _messages,
    "floods": all_beside,
    "shares": sharing.two_principals,
    "overload": sharing.overload,
    "kills": _kills,
    "clients": _clients,
    "device": _device,
    "codes": _codes,
    "schemas": _schemas,
    "costs": costs,
    "table": table,
    "honest": honest,
    "bundles": bundles,
    "files": files,
    "sampling": sampling,
    "stops": stops,
    "thousand": thousand,
    "soak": soak,
}
