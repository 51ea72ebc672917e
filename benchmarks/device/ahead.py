"""Guesses ahead of the answers: how many outcomes are foreseen, and what that does to speed, by link, target and text.

A cell is one link, one kind of text and one time of a forward (emulated, see benchmarks.kit.emulation). In it every
prompt is answered in all ways in turn, so that what slows the machine slows all of them; the texts must be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

import psutil

from benchmarks.device.grid import Network, lanes_for
from benchmarks.kit.figures import pivot, table, titled, values_of
from benchmarks.kit.lab import Asking
from benchmarks.kit.options import one_of
from benchmarks.kit.progress import Progress
from benchmarks.kit.prompts import by_kind
from benchmarks.kit.verifier import Emulated, Pair, verifier
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.tools.compare import TimedAnswer, ask
from edge_client.tools.emulated_network import PROFILES
from moa.errors import MoaError

PLAIN, ROUNDS, SERVER, AUTO = "plain API streaming", "device, by rounds", "server-drafted", "auto"
AHEAD = "device, guesses ahead"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"draft": "none", "sync": "off"},
    ROUNDS: {"draft": "device", "foresee": False},
    AHEAD: {"draft": "device", "foresee": True},
    SERVER: {"draft": "server"},
    AUTO: {"draft": "auto", "foresee": True},
}
KINDS = ("exercises", "code", "english", "mixed")
OUTCOMES = ("likeliest", "branch", "missed", "beyond")


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """What is measured where."""

    prompts: int = 3
    """Of every kind."""
    tokens: int = 64
    """Of an answer at most."""
    kinds: tuple[str, ...] = one_of(("exercises", "code"), KINDS)
    """Kinds of text."""
    links: tuple[str, ...] = one_of(("4g", "4g-weak"), PROFILES)
    """Emulated links."""
    steps: tuple[float, ...] = (10.0, 30.0, 60.0, 120.0)
    """Milliseconds of a forward of the target."""
    temperatures: tuple[float, ...] = (0.0,)
    """Of sampling; 0 is greedy."""
    ways: tuple[str, ...] = one_of(tuple(WAYS), WAYS)
    lanes: int = 4
    """Cells at a time at most; with one, the processor time of the verifier is counted too."""
    at_once: int = 1
    """Conversations of each way at a time, on one verifier."""


class Cell(NamedTuple):
    """Where the ways are compared."""

    link: str
    kind: str
    temperature: float


def measure(options: Options) -> dict[str, Any]:
    """All cells, one step time after another."""
    device = Device.load(options.bundle)
    encoder = EdgeClient(ClientSettings(), device=device)
    prompts: dict[str, list[list[int]]] = {}
    for kind, example in by_kind(options.prompts):
        plain = kind in ("code", "english") or not device.codec.can_chat
        prompts.setdefault(kind, []).append(encoder.encode(example.prompt, raw=plain))
    cells = [Cell(*cell) for cell in product(options.links, options.kinds, options.temperatures)]
    progress = Progress(len(cells) * len(options.steps), "cells")
    runs: list[dict[str, Any]] = []
    for step in options.steps:
        lanes = min(options.lanes, lanes_for(step, len(cells)))
        pair, emulated = Pair(options.target, options.drafter), Emulated(step_ms=step, lanes=len(cells))
        flags = ("--slots=8", "--max-context-tokens=1024", "--max-chain-tokens=64")
        with (
            verifier(*flags, pair=pair, emulated=emulated, threads=1) as running,
            Network() as network,
            ThreadPoolExecutor(lanes) as pool,
        ):

            def work(number: int, urls: Sequence[str] = running.urls, network: Network = network) -> list[TimedAnswers]:
                cell = cells[number]
                with network.link(urls[number], PROFILES[cell.link]) as link:
                    found = asyncio.run(_in_turn(options, link.url, cell, prompts[cell.kind], running.stats))
                progress.step(f"{cell.link} {cell.kind}")
                return found

            for cell, found in zip(cells, pool.map(work, range(len(cells))), strict=True):
                uncounted = {} if lanes == 1 else {"server_ms_per_token": None}
                runs += [{"step_ms": step, **cell._asdict(), **figures(*answers), **uncounted} for answers in found]
        for run in runs:
            run.setdefault("late_forwards", round(running.late / max(1, running.forwards), 3))
    return {"prompts": options.prompts, "tokens": options.tokens, "at_once": options.at_once, "runs": runs}


TimedAnswers = tuple[str, list[TimedAnswer], float]
"""A way, its answers, and the processor time of the verifier meanwhile."""


async def _in_turn(
    options: Options, url: str, cell: Cell, prompts: Sequence[Sequence[int]], server: psutil.Process
) -> list[TimedAnswers]:
    """Every prompt in all ways, one way after another; each way has clients of its own."""
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, list[EdgeClient]] = {}
        for way in options.ways:
            settings = ClientSettings(
                verifier=url,
                max_new_tokens=options.tokens,
                temperature=cell.temperature,
                seed=1,
                settle_seconds=60.0,
                **WAYS[way],
            )
            for _ in range(options.at_once):
                device = Device.load(options.bundle, threads=1)
                client = await stack.enter_async_context(EdgeClient(settings, device=device))
                await client.wait_online(60)
                clients.setdefault(way, []).append(client)
        found: dict[str, list[TimedAnswer]] = {way: [] for way in clients}
        spent = dict.fromkeys(clients, 0.0)
        for some in _batches(prompts, options.at_once):
            for way, askers in clients.items():
                before = _cpu_seconds(server)
                asked = (ask(client, ids) for client, ids in zip(askers, some, strict=False))
                found[way] += await asyncio.gather(*asked)
                spent[way] += _cpu_seconds(server) - before
                if [a.ids for a in found[way]] != [a.ids for a in found[options.ways[0]][: len(found[way])]]:
                    raise MoaError(f"{way} over {cell.link}: another text than that of {options.ways[0]}")
    return [(way, answers, spent[way]) for way, answers in found.items()]


def _batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    rest = iter(prompts)
    while some := list(islice(rest, size)):
        yield some


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def figures(way: str, answers: Sequence[TimedAnswer], server_seconds: float) -> dict[str, Any]:
    """What one way shows in a cell."""
    names = ("tokens", "seconds", "forwards", "drafted", "foresees", "sent_bytes", "received_bytes")
    total = {name: sum(answer.stats[name] for answer in answers) for name in names}
    outcomes, by = Counter[str](), Counter[str]()
    for answer in answers:
        outcomes.update(answer.stats["outcomes"])
        by.update(answer.stats["streamed_by"])
    tokens = max(1, total["tokens"])
    return {
        "way": way,
        "tokens_per_second": total["tokens"] / total["seconds"],
        "forwards_per_token": total["forwards"] / tokens,
        "server_ms_per_token": 1000 * server_seconds / tokens,
        "up_bytes_per_token": total["sent_bytes"] / tokens,
        "down_bytes_per_token": total["received_bytes"] / tokens,
        "drafted_per_token": total["drafted"] / tokens,
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "by": {name: by[name] for name in ("device", "server", "none")},
    }


_COSTS = {
    "Forwards of the target a token": "{forwards_per_token:.2f}",
    "Bytes up / down a token": "{up_bytes_per_token:.0f} / {down_bytes_per_token:.0f}",
}
"""At the step time in the middle."""


def tables(result: Mapping[str, Any]) -> str:
    """Speed and its ratios by step time; outcomes; who drafted; what a token costs."""
    runs = [
        run
        | {"where": f"{run['link']}, {run['kind']}" + (f", T = {run['temperature']:g}" if run["temperature"] else "")}
        for run in result["runs"]
    ]
    parts = []
    for step in values_of(runs, "step_ms"):
        of_step = [run for run in runs if run["step_ms"] == step]
        parts.append((f"Tokens a second, {step:g} ms a forward (emulated)", pivot(of_step, "way", "where",
                      "{tokens_per_second:.1f}", "")))  # fmt: skip
    ways = set(values_of(runs, "way"))
    if {AUTO, ROUNDS, SERVER, PLAIN} <= ways:
        parts.append(("`auto` against the device's rounds / the server's drafting / plain streaming", ratios(runs)))
    parts.append(("What became of a forward's outcome, `device, guesses ahead`", shares(runs, AHEAD, "outcomes")))
    parts.append(("Who drafted the tokens, `auto`", shares(runs, AUTO, "by")))
    steps = values_of(runs, "step_ms")
    middle = [run for run in runs if run["step_ms"] == steps[len(steps) // 2]]
    parts += [(title, pivot(middle, "way", "where", cell, "")) for title, cell in _COSTS.items()]
    if all(run["server_ms_per_token"] is not None for run in middle):
        title = "Milliseconds of the verifier's processor a token"
        parts.append((title, pivot(middle, "way", "where", "{server_ms_per_token:.2f}", "")))
    several = f" {result['at_once']} conversations of a way at a time." if result["at_once"] > 1 else ""
    late = max(run["late_forwards"] for run in runs)
    return (
        f"{titled(*parts)}\n\nAll texts are the target's own; {result['prompts']} prompts of a kind, "
        f"{result['tokens']} tokens at most, the ways in turn at every prompt. At most {late:.0%} of forwards took "
        f"longer than stated.{several}"
    )


def ratios(runs: Sequence[Mapping[str, Any]]) -> str:
    """Of `auto` to others, by step time and place."""
    speed = {(run["step_ms"], run["where"], run["way"]): run["tokens_per_second"] for run in runs}
    places = values_of(runs, "where")
    rows = [
        [f"{step:g} ms", *(
            " / ".join(f"{speed[step, place, AUTO] / speed[step, place, way]:.2f}" for way in (ROUNDS, SERVER, PLAIN))
            for place in places
        )]
        for step in values_of(runs, "step_ms")
    ]  # fmt: skip
    return table(["", *places], rows)


def shares(runs: Sequence[Mapping[str, Any]], way: str, field: str) -> str:
    """Of what one way counted, over all step times."""
    rows = []
    for place in values_of(runs, "where"):
        counted = Counter[str]()
        for run in runs:
            if run["way"] == way and run["where"] == place:
                counted.update(run[field])
        total = max(1, counted.total())
        rows.append([place, *(f"{counted[name] / total:.0%}" for name in counted)])
    names = list(next(run[field] for run in runs))
    return table(["", *names], rows)
