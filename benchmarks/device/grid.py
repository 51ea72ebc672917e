"""Speed, calls and bytes of every way of decoding, over every emulated link, with targets of several speeds.

What is emulated is the link, and with --steps the time of a forward (see benchmarks.kit.emulation), up to those of
models of 8B to 70B. Everything else is real: both ends, the wire, the drafts and how many of them are accepted; every
text is compared with the target's own. Slow targets run in several lanes that share only the processor; faster targets
get fewer lanes. Ways take turns in each pass, so that other load affects all of them, and each pass starts at another
point of a link's cycle.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.kit.figures import pivot, titled, values_of
from benchmarks.kit.lab import LINKS, Asking, link_to, mean_rtt, open_lab, turned
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import WEIGHTS
from benchmarks.kit.progress import Progress, say
from benchmarks.kit.verifier import Emulated, Pair, Running, verifier
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.tools.compare import TimedAnswer, ask, rates
from edge_client.tools.emulated_network import PROFILES, LinkProxy, Profile
from moa.demo import paths
from moa.errors import MoaError

SLOWEST = "a call a token"
"""Bound by the round trip only, so that one pass is enough."""


@dataclass(frozen=True)
class Way:
    """How to decode, with which bundle on the device and which drafter on the server."""

    settings: Mapping[str, Any]
    bundle: str = "moa"
    server: str = "moa"


WAYS: dict[str, Way] = {
    "plain API streaming": Way({"draft": "none", "sync": "off"}),
    SLOWEST: Way({"draft": "single", "sync": "off"}),
    "device": Way({"draft": "device"}),
    "server-drafted": Way({"draft": "server"}),
    "auto": Way({"draft": "auto"}),
    "device, independent": Way({"draft": "device", "sync": "off"}, bundle="independent"),
    "server-drafted, eagle2": Way({"draft": "server", "sync": "off"}, server="eagle2"),
}


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """The cells to measure."""

    prompts: int = 4
    """Of the held-out prompts, of all kinds; 0 takes all."""
    tokens: int = 64
    """Tokens of an answer at most."""
    steps: tuple[float, ...] = (0.0,)
    """Milliseconds of a forward of the target; 0 leaves it as it is."""
    links: tuple[str, ...] = one_of(LINKS, PROFILES)
    """Emulated links."""
    ways: tuple[str, ...] = one_of(tuple(WAYS), WAYS)
    """Ways to measure; those with an untrained drafter are left out."""
    repeats: int = 3
    """Passes; the figures are medians."""
    lanes: int = 12
    """Conversations at a time at most, with a slow target."""
    independent: str = str(WEIGHTS / "independent")
    """An independent drafter: weights, or a bundle."""
    eagle: str = str(WEIGHTS / "eagle2")
    """EAGLE-2's weights, for the server."""


class Cell(NamedTuple):
    """One way over one link, once."""

    link: str
    repeat: int
    way: str


def cells_of(options: Options, ways: Sequence[str], lanes: int) -> list[Cell]:
    """All cells of one step time: way by way in each pass; with several lanes the longest first."""
    cells = [
        Cell(link, repeat, way)
        for link in options.links
        for repeat in range(options.repeats)
        for way in ways
        if not (repeat and way == SLOWEST)
    ]
    if lanes > 1:
        cells.sort(key=lambda cell: WAYS[cell.way].settings["draft"] not in ("single", "none"))
    return cells


def lanes_for(step_ms: float, most: int) -> int:
    """As many conversations at a time as leave the processor mostly idle."""
    return max(1, min(most, int(step_ms // 8)))


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


class Grid:
    """The prompts with the target's own answers, and the cells of one step time after another."""

    def __init__(self, options: Options, bundles: Mapping[str, str], ways: Sequence[str]) -> None:
        self.options, self.ways, self._bundles = options, ways, bundles
        with open_lab(options) as lab:
            self.prompts = lab.prompts
            answers = asyncio.run(lab.answers(draft="single", sync="off", max_new_tokens=options.tokens))
            self.truth = [answer.ids for answer in answers]

    @contextlib.contextmanager
    def serving(self, step_ms: float, lanes: int) -> Iterator[dict[str, Running]]:
        """By who drafts there: a verifier with this step time."""
        pair = Pair(self.options.target, self.options.drafter)
        with contextlib.ExitStack() as stack:
            found = {}
            for name in {WAYS[way].server for way in self.ways}:
                baseline = "" if name == "moa" else self.options.eagle
                emulated = Emulated(step_ms, lanes, baseline) if step_ms or baseline else None
                flags = ("--slots=4", "--max-context-tokens=1024", "--max-prompt-tokens=512", "--max-chain-tokens=64")
                running = verifier(*flags, pair=pair, emulated=emulated, threads=1)
                found[name] = stack.enter_context(running)
            yield found

    def step(self, step_ms: float) -> list[dict[str, Any]]:
        """All cells at one step time."""
        lanes = lanes_for(step_ms, self.options.lanes)
        cells = cells_of(self.options, self.ways, lanes)
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            todo.put(cell)
        progress = Progress(len(cells), f"cells at {step_ms:g} ms a forward")
        with self.serving(step_ms, lanes) as servers, Network() as network, ThreadPoolExecutor(lanes) as pool:
            processes = [psutil.Process(), *(running.stats for running in servers.values())]
            began, busy = time.perf_counter(), _cpu_seconds(processes)

            def work(lane: int) -> list[dict[str, Any]]:
                # A set for each lane: a device's thread is its own.
                devices = {name: Device.load(folder, threads=1) for name, folder in self._bundles.items()}
                runs = []
                with contextlib.suppress(queue.Empty):
                    while True:
                        cell = todo.get_nowait()
                        way = WAYS[cell.way]
                        # By pass and lane, and with several lanes by way, a cell begins elsewhere in a link's cycle.
                        turn = cell.repeat / self.options.repeats + lane / lanes
                        turn += 0.37 * list(WAYS).index(cell.way) if lanes > 1 else 0.0
                        profile = turned(PROFILES[cell.link], turn)
                        with network.link(servers[way.server].urls[lane], profile) as link:
                            runs.append(self.run(cell, step_ms, link.url, devices[way.bundle]))
                        progress.step(f"{cell.link} {cell.way}: {runs[-1]['tokens_per_second']:.1f} tokens/s")
                return runs

            runs = [run for future in [pool.submit(work, lane) for lane in range(lanes)] for run in future.result()]
            share = (_cpu_seconds(processes) - busy) / (time.perf_counter() - began)
        forwards = sum(running.forwards for running in servers.values())
        late = sum(running.late for running in servers.values()) / max(1, forwards)
        runs.sort(key=lambda run: (self.options.links.index(run["link"]), list(WAYS).index(run["way"])))
        return [
            {**run, "lanes": lanes, "cores_busy": round(share, 2), "late_forwards": round(late, 3)}
            for run in middles(runs)
        ]

    def run(self, cell: Cell, step_ms: float, url: str, device: Device) -> dict[str, Any]:
        """One cell: all prompts, one after another."""
        settings = ClientSettings(
            verifier=url, max_new_tokens=self.options.tokens, settle_seconds=60.0, **WAYS[cell.way].settings
        )

        async def asked() -> tuple[list[TimedAnswer], float]:
            """The answers, and the CPU seconds of this thread, in which the client runs."""
            async with EdgeClient(settings, device=device) as client:
                await client.wait_online(60)
                before = time.thread_time()
                answers = [await ask(client, ids) for ids in self.prompts]
                return answers, time.thread_time() - before

        answers, cpu = asyncio.run(asked())
        if [answer.ids for answer in answers] != self.truth:
            raise MoaError(f"{cell.way} over {cell.link} at {step_ms:g} ms: a text differs from the target's own")
        return {"link": cell.link, "step_ms": step_ms, "way": cell.way, "same": len(answers), **figures(answers, cpu)}


def figures(answers: Sequence[TimedAnswer], cpu_seconds: float) -> dict[str, float]:
    """The figures of a cell."""
    names = ("tokens", "sent_bytes", "received_bytes", "offline_tokens", "retracted")
    total = {name: sum(answer.stats.get(name, 0) for answer in answers) for name in names}
    tokens = max(1, total["tokens"])
    return rates(answers) | {
        "up_bytes_per_token": total["sent_bytes"] / tokens,
        "down_bytes_per_token": total["received_bytes"] / tokens,
        "edge_cpu_ms_per_token": 1000 * cpu_seconds / tokens,
        "provisional_tokens": total["offline_tokens"],
        "retracted_tokens": total["retracted"],
    }


def middles(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run for all passes of a cell: medians; texts are counted."""
    passes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        passes.setdefault((run["link"], run["way"]), []).append(run)
    keys = ("link", "step_ms", "way", "same")
    return [
        {key: found[0][key] for key in keys[:3]}
        | {"same": sum(run["same"] for run in found), "repeats": len(found)}
        | {key: median(run[key] for run in found) for key in found[0] if key not in keys}
        | {"speeds": [round(run["tokens_per_second"], 1) for run in found]}
        for found in passes.values()
    ]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(options: Options) -> dict[str, Any]:
    """The whole grid."""
    sys.setswitchinterval(0.0005)  # lanes share an interpreter
    has = {"moa": True, "independent": Path(options.independent).is_dir(), "eagle2": Path(options.eagle).is_dir()}
    ways = [name for name in options.ways if has[WAYS[name].bundle] and has[WAYS[name].server]]
    if left_out := [name for name in options.ways if name not in ways]:
        say(f"left out, the drafter is not there: {', '.join(left_out)}")
    with tempfile.TemporaryDirectory() as folder:
        bundles = {"moa": options.bundle}
        if any(WAYS[way].bundle == "independent" for way in ways):
            bundles["independent"] = _independent(Path(options.independent), Path(folder) / "bundle")
        grid = Grid(options, bundles, ways)
        runs = [run for step in options.steps for run in grid.step(step)]
    return {
        "prompts": len(grid.prompts),
        "tokens": options.tokens,
        "rtt_ms": {link: mean_rtt(PROFILES[link]) for link in options.links},
        "runs": runs,
    }


def _independent(folder: Path, out: Path) -> str:
    """The folder itself when it is a bundle, or one made of the weights in it."""
    if (folder / "manifest.json").exists():
        return str(folder)
    from benchmarks.drafters.bundle import build_independent  # the exporter takes seconds to import

    return str(build_independent(folder, str(paths().target), out))


_BESIDE = {
    "Calls per 100 tokens": "{calls_per_100:.1f}",
    "Milliseconds to the first token": "{first_token_ms:.0f}",
    "Bytes up a token": "{up_bytes_per_token:.0f}",
    "Bytes down a token": "{down_bytes_per_token:.0f}",
    "Milliseconds of CPU on the edge a token (the client's own thread)": "{edge_cpu_ms_per_token:.2f}",
    "Milliseconds that the client adds to a round (p50)": "{overhead_ms:.2f}",
}


def tables(result: Mapping[str, Any]) -> str:
    """Speed by step time and link, and what a way costs beside time, at the step time in the middle."""
    runs, steps = result["runs"], sorted(values_of(result["runs"], "step_ms"))
    links = sorted(values_of(runs, "link"), key=lambda link: result["rtt_ms"][link])

    def shown(title: str, step: float, cell: str) -> tuple[str, str]:
        emulated = f", {step:g} ms a forward (emulated)" if step else ""
        of_step = [run for run in runs if run["step_ms"] == step]
        return title + emulated, pivot(of_step, "way", "link", cell, "", links)

    parts = [shown("Tokens a second", step, "{tokens_per_second:.1f}") for step in steps]
    parts += [shown(title, steps[len(steps) // 2], cell) for title, cell in _BESIDE.items()]
    same, repeats = sum(run["same"] for run in runs), sum(run["repeats"] for run in runs)
    told = f"{same} of {result['prompts'] * repeats} texts equal the target's own; links are emulated."
    if (most := max(run["repeats"] for run in runs)) > 1:
        told += f" Medians of {most} passes, the ways in turn (`{SLOWEST}`: one pass)."
    if any(steps):
        told += (
            f" The time of a forward is emulated. {max(run['lanes'] for run in runs)} conversations at a time at most, "
            f"{max(run['cores_busy'] for run in runs):.1f} cores busy at most, and at most "
            f"{max(run['late_forwards'] for run in runs):.0%} of forwards took longer than stated."
        )
    return f"{titled(*parts)}\n\n{told}"
