"""Speed of every way of decoding by link, time of a forward and text, each way compared prompt by
prompt.

A cell is a link, a time of a forward of the target and a temperature. In a cell every prompt is
answered in all ways in turn, each time beginning with another, so that what slows the machine slows
all of them; half of the prompts are exercises, half natural text. What is emulated is the link, and
with --steps the time of a forward (see benchmarks.kit.emulation), up to those of models of 8B to
70B. Everything else is real: both ends, the wire, the drafts and how many of them are accepted;
every text is compared with the first way's. Cells of slow targets run side by side, each with a
verifier of its own: they share only the processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.device import winners
from benchmarks.kit.lab import LINKS, Asking, link_to, mean_rtt, turned
from benchmarks.kit.options import one_of
from benchmarks.kit.paired import EXERCISES
from benchmarks.kit.progress import Progress
from benchmarks.provenance import commit
from benchmarks.witness.replayed import recorded
from demo.held_out import PLAIN as WITHOUT_CHAT
from demo.held_out import by_kind
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.tools.compare import TimedAnswer, ask, rates
from edge_client.tools.emulated_network import PROFILES, LinkProxy, Profile
from moa.errors import MoaError, UsageError
from testing.verifier import Emulated, Pair, Running, verifier

WAITING = "device, a draft an answer"
KINDS = (EXERCISES, "code", "english", "mixed")


@dataclass(frozen=True)
class Way:
    """How to decode, with which bundle on the device and which drafter on the server."""

    settings: Mapping[str, Any]
    bundle: str = ""
    drafter: str = ""
    graph: str = ""
    """The bundle by whose graph the server's drafter drafts."""


WAYS: dict[str, Way] = {
    "plain API streaming": Way({"draft": "none", "sync": "off"}),
    WAITING: Way({"draft": "device", "guess_ahead": False}),
    "device": Way({"draft": "device"}),
    "server-drafted": Way({"draft": "server"}),
    "auto": Way({"draft": "auto"}),
}
USUAL = tuple(way for way in WAYS if way != WAITING)


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """The cells to measure."""

    prompts: int = 16
    """Of a cell."""
    tokens: int = 48
    """Tokens of an answer at most."""
    kinds: tuple[str, ...] = one_of(KINDS, KINDS)
    """Kinds of text; exercises and natural text are half of the prompts each."""
    steps: tuple[float, ...] = (0.0,)
    """Milliseconds of a forward of the target; 0 leaves it as it is."""
    texts: str = ""
    """Recorded texts of the target, which are asked for and which it reads: `python -m
    benchmarks.witness heldout`."""
    server_drafter: str = ""
    """With recorded texts: the folder of the drafter by which the server drafts, beside the
    device's."""
    level_share: float = 0.05
    """There a level of drafts takes this share of a forward, as a drafter of 3 % with 32,768 words
    of its own."""
    links: tuple[str, ...] = one_of(LINKS, PROFILES)
    """Emulated links."""
    temperatures: tuple[float, ...] = (0.0,)
    """Of sampling; 0 is greedy."""
    ways: tuple[str, ...] = one_of(USUAL, WAYS)
    pairs: tuple[str, ...] = ()
    """Opponents, NAME=BUNDLE=DRAFTER: a bundle for the device, a folder of weights for the server,
    or one of them. With both the server drafts by the bundle's graph."""
    repeats: int = 1
    """Passes over the prompts; of each prompt the median counts."""
    lanes: int = 5
    """Cells at a time at most; with one, the processor time of the verifier is counted too."""
    kept: str = ""
    """A file for finished cells: a run that was interrupted goes on from there, at the same commit."""


tables = winners.tables


class Cell(NamedTuple):
    """Where the ways are compared."""

    link: str
    temperature: float


def texts(kinds: Sequence[str], count: int) -> list[tuple[str, Any]]:
    """So many prompts with their kinds: exercises and natural text in turn, and the kinds of that
    in turn."""
    found: dict[str, list[Any]] = {}
    for kind, example in by_kind(count):
        found.setdefault(kind, []).append((kind, example))
    natural = [
        one
        for one in chain(*zip_longest(*(found[kind] for kind in kinds if kind != EXERCISES)))
        if one
    ]
    halves = [half for half in (found[EXERCISES] if EXERCISES in kinds else [], natural) if half]
    return list(islice(chain(*zip(*halves, strict=False)), count))


def ways_of(options: Options) -> dict[str, Way]:
    """Ours and the opponents'."""
    ways = {name: replace(WAYS[name], drafter=options.server_drafter) for name in options.ways}
    for pair in options.pairs:
        try:
            name, bundle, drafter = pair.split("=")
        except ValueError:
            raise UsageError(f"a pair is NAME=BUNDLE=DRAFTER, not {pair!r}") from None
        if bundle:
            device = {"draft": "device", "sync": "off"}
            ways[f"device, {name}"] = Way(device, bundle=bundle, drafter=options.server_drafter)
        if drafter:
            ways[f"server-drafted, {name}"] = Way(
                {"draft": "server", "sync": "off"}, drafter=drafter, graph=bundle
            )
    return ways


def lanes_for(step_ms: float, most: int) -> int:
    """As many cells at a time as leave the processor mostly idle."""
    return max(1, min(most, int(step_ms // 10)))


class Network:
    """Emulated links in their own thread, so that their cost is not counted as the device's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def link(self, url: str, profile: Profile) -> Iterator[LinkProxy]:
        """The address behind such a link, which begins now."""
        link = link_to(url, profile)
        asyncio.run_coroutine_threadsafe(link.__aenter__(), self._loop).result(10)
        try:
            yield link
        finally:
            asyncio.run_coroutine_threadsafe(link.__aexit__(), self._loop).result(10)


@dataclass
class Answers:
    """Of one way in a cell: by prompt the seconds of every pass, and the answers themselves."""

    seconds: list[list[float]] = field(default_factory=list)
    server_seconds: list[list[float]] = field(default_factory=list)
    """Processor time of the verifier."""
    edge_seconds: float = 0.0
    """Processor time of the client's thread."""
    all: list[TimedAnswer] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As a result keeps them."""
        names = ("tokens", "forwards", "drafted", "guess_messages", "sent_bytes", "received_bytes")
        total = {name: sum(answer.stats.get(name, 0) for answer in self.all) for name in names}
        tokens = max(1, total["tokens"])
        counted: dict[str, Counter[str]] = {"outcomes": Counter(), "streamed_by": Counter()}
        for answer, (name, counter) in product(self.all, counted.items()):
            counter.update(answer.stats.get(name, {}))
        found = rates(self.all)
        return {
            "seconds": self.seconds,
            "server_seconds": self.server_seconds,
            "tokens": [answer.stats["tokens"] for answer in self.all[: len(self.seconds)]],
            "calls_per_100": round(found["calls_per_100"], 2),
            "first_token_ms": round(found["first_token_ms"], 1),
            "forwards_per_token": round(total["forwards"] / tokens, 4),
            "up_bytes_per_token": round(total["sent_bytes"] / tokens, 1),
            "down_bytes_per_token": round(total["received_bytes"] / tokens, 1),
            "edge_cpu_ms_per_token": round(1000 * self.edge_seconds / tokens, 3),
            **{name: dict(counter) for name, counter in counted.items()},
        }


class Grid:
    """The prompts, and the cells of one step time after another."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ways = ways_of(options)
        self.answers: list[list[int]] = []
        """What the target says, where that is known."""
        if options.texts:
            known = recorded(Path(options.texts), options.prompts)
            self.kinds = [text.kind for text in known]
            self.prompts = [text.prompt for text in known]
            self.answers = [text.answer for text in known]
        else:
            encoder = EdgeClient(ClientSettings(), device=(device := Device.load(options.bundle)))
            asked = texts(options.kinds, options.prompts)
            self.kinds = [kind for kind, _ in asked]
            self.prompts = [
                encoder.encode(
                    example.prompt, raw=kind in WITHOUT_CHAT or not device.codec.can_chat
                )
                for kind, example in asked
            ]
        self.cells = [Cell(*cell) for cell in product(options.links, options.temperatures)]
        self._kept = Path(options.kept) if options.kept else None
        same = {
            "commit": commit(),
            **{k: v for k, v in asdict(options).items() if k not in ("links", "steps")},
        }
        self._same = json.dumps(same, sort_keys=True)
        """What a kept cell must agree in."""
        self._writing = threading.Lock()

    def step(
        self, step_ms: float, progress: Progress
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All cells at one step time, and how busy the machine was."""
        found = self._finished(step_ms)
        for _ in found:
            progress.step("kept")
        todo = [cell for cell in self.cells if cell not in found]
        lanes = lanes_for(step_ms, min(len(todo), self.options.lanes))
        busy: dict[str, Any] = {"step_ms": step_ms, "lanes": lanes}
        if todo:
            with (
                self._serving(step_ms, len(todo)) as servers,
                Network() as network,
                ThreadPoolExecutor(lanes) as pool,
            ):
                processes = [running.stats for running in servers.values()]
                before = _cpu_seconds([psutil.Process(), *processes])
                began = time.perf_counter()

                def work(number: int) -> None:
                    cell = todo[number]
                    urls = {name: running.urls[number] for name, running in servers.items()}
                    found[cell] = self._cell(cell, urls, network, processes if lanes == 1 else [])
                    self._keep(step_ms, cell, found[cell])
                    progress.step(f"{step_ms:g} ms, {cell.link}")

                for done in [pool.submit(work, number) for number in range(len(todo))]:
                    done.result()
                spent = _cpu_seconds([psutil.Process(), *processes]) - before
                busy["cores_busy"] = round(spent / (time.perf_counter() - began), 2)
            forwards = sum(running.forwards for running in servers.values())
            busy["late_forwards"] = round(
                sum(running.late for running in servers.values()) / max(1, forwards), 3
            )
        return [
            {"step_ms": step_ms, **cell._asdict(), "way": way, **run}
            for cell in self.cells
            for way, run in found[cell].items()
        ], busy

    @contextlib.contextmanager
    def _serving(self, step_ms: float, lanes: int) -> Iterator[dict[str, Running]]:
        """By who drafts there: so many verifiers with this step time."""
        own = self.options.drafter
        by_graph = bool(own)
        pair = Pair(self.options.target, own, self.options.bundle if by_graph else "")
        context = 512 if self.options.texts else 1024
        flags = (
            "--slots=8",
            f"--max-context-tokens={context}",
            "--max-prompt-tokens=384",
        )
        with contextlib.ExitStack() as stack:
            found = {}
            for drafter, graph in {(way.drafter, way.graph) for way in self.ways.values()}:
                level_ms = self.options.level_share * step_ms
                texts = self.options.texts
                emulated = Emulated(
                    step_ms, lanes, drafter, graph, texts, self.options.prompts, level_ms
                )
                found[drafter] = stack.enter_context(
                    verifier(*flags, pair=pair, emulated=emulated, threads=1)
                )
            yield found

    def _cell(
        self,
        cell: Cell,
        urls: Mapping[str, str],
        network: Network,
        servers: Sequence[psutil.Process],
    ) -> dict[str, Any]:
        profile = turned(PROFILES[cell.link], 0.37 * self.cells.index(cell))
        with contextlib.ExitStack() as stack:
            links = {
                name: stack.enter_context(network.link(url, profile)).url
                for name, url in urls.items()
            }
            answers = asyncio.run(self._in_turn(cell, links, servers))
        return {way: one.figures() for way, one in answers.items()}

    async def _in_turn(
        self, cell: Cell, links: Mapping[str, str], servers: Sequence[psutil.Process]
    ) -> dict[str, Answers]:
        """Every prompt in all ways, one way after another; each way has a client of its own."""
        options = self.options
        found = {way: Answers() for way in self.ways}
        async with contextlib.AsyncExitStack() as stack:
            clients: dict[str, EdgeClient] = {}
            devices = {
                way.bundle: Device.load(way.bundle or options.bundle, threads=1)
                for way in self.ways.values()
            }
            for name, way in self.ways.items():
                settings = ClientSettings(
                    verifier=links[way.drafter],
                    max_new_tokens=options.tokens,
                    temperature=cell.temperature,
                    seed=1,
                    settle_seconds=60.0,
                    **way.settings,
                )
                clients[name] = await stack.enter_async_context(
                    EdgeClient(settings, device=devices[way.bundle])
                )
                await clients[name].wait_online(60)
            names = list(clients)
            for number, (_, (place, ids)) in enumerate(
                product(range(options.repeats), enumerate(self.prompts))
            ):
                first = number % len(names)
                answers: dict[str, list[int]] = {}
                for name in names[first:] + names[:first]:
                    server = _cpu_seconds(servers)
                    edge = time.thread_time()
                    answer = await ask(clients[name], ids)
                    one = found[name]
                    if place == len(one.seconds):
                        one.seconds.append([])
                        one.server_seconds.append([])
                    one.seconds[place].append(answer.stats["seconds"])
                    one.server_seconds[place].append(round(_cpu_seconds(servers) - server, 4))
                    one.edge_seconds += time.thread_time() - edge
                    one.all.append(answer)
                    answers[name] = answer.ids
                if self.answers:
                    answers["recorded"] = self.answers[place][: len(answers[names[0]])]
                if any(ids != answers[names[0]] for name, ids in answers.items()):
                    raise MoaError(
                        f"over {cell.link}, prompt {place}: not all ways gave the same text"
                    )
        return found

    def _finished(self, step_ms: float) -> dict[Cell, dict[str, Any]]:
        """The cells of this step time that an earlier run has measured."""
        if self._kept is None or not self._kept.exists():
            return {}
        lines = map(json.loads, self._kept.read_text(encoding="utf-8").splitlines())
        found = {
            Cell(*one["cell"]): one["runs"]
            for one in lines
            if (one["of"], one["step"]) == (self._same, step_ms)
        }
        return {cell: runs for cell, runs in found.items() if cell in self.cells}

    def _keep(self, step_ms: float, cell: Cell, runs: dict[str, Any]) -> None:
        if self._kept is not None:
            with self._writing, self._kept.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"of": self._same, "step": step_ms, "cell": cell, "runs": runs})
                    + "\n"
                )


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """On Linux by the clock of each process, which does not count in ticks of ten milliseconds."""
    if sys.platform == "linux":
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)
    return sum(
        times.user + times.system for times in (process.cpu_times() for process in processes)
    )


def measure(options: Options) -> dict[str, Any]:
    """The whole grid."""
    sys.setswitchinterval(0.0005)  # lanes share an interpreter
    grid = Grid(options)
    progress = Progress(len(options.steps) * len(grid.cells), "cells")
    # The slowest first: then the time to go is rather too long than too short.
    done = {step: grid.step(step, progress) for step in sorted(options.steps, reverse=True)}
    return {
        "prompts": len(grid.prompts),
        "tokens": options.tokens,
        "repeats": options.repeats,
        "kinds": grid.kinds,
        "rtt_ms": {link: mean_rtt(PROFILES[link]) for link in options.links},
        "steps": [done[step][1] for step in options.steps],
        "runs": [run for step in options.steps for run in done[step][0]],
    }
