"""Every way of decoding over every link, with a target slowed to the step times of models of 8B to 70B.

python -m benchmarks.client_slow --json benchmarks/results/client_slow.json

What is emulated: the link, and the time of a forward (see benchmarks.emulation). Everything else is real: both ends,
the wire, the drafts and how many of them are accepted. Cells run side by side in lanes that share nothing but the
processor, the fewer the faster the target; each cell says how busy the processor was.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks import client_kit, report
from benchmarks.emulation import Running, verifiers
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.tools.compare import TimedAnswer, ask, ask_all
from edge_client.tools.emulated_network import PROFILES, LinkProxy, Profile
from moa.demo import paths
from moa.errors import MoaError, UsageError, run_cli

STEPS = (10.0, 30.0, 60.0, 120.0)
WEIGHTS = Path(__file__).parent / "baselines" / "weights"


@dataclass(frozen=True)
class Way:
    """How to decode, with which bundle on the device and which drafter on the server."""

    settings: Mapping[str, Any]
    bundle: str = "moa"
    server: str = "moa"


WAYS: dict[str, Way] = {
    "plain API streaming": Way({"draft": "none", "sync": "off"}),
    "a call a token": Way({"draft": "single", "sync": "off"}),
    "device": Way({"draft": "device"}),
    "server-drafted": Way({"draft": "server"}),
    "auto": Way({"draft": "auto"}),
    "device, independent": Way({"draft": "device", "sync": "off"}, bundle="independent"),
    "server-drafted, eagle2": Way({"draft": "server", "sync": "off"}, server="eagle2"),
}


class Network:
    """Emulated links in a thread of their own, so that what they cost is not counted as the device's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._links: list[LinkProxy] = []

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            asyncio.run_coroutine_threadsafe(link.__aexit__(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, url: str, profile: Profile) -> str:
        """The address of `url` behind such a link, which begins now."""
        parts = urlsplit(url)
        link = LinkProxy(parts.hostname or "", parts.port or 0, profile)
        asyncio.run_coroutine_threadsafe(link.__aenter__(), self._loop).result(10)
        self._links.append(link)
        return link.url


@dataclass(frozen=True)
class Cell:
    """One way over one link."""

    way: str
    link: str


def mean_rtt(profile: Profile) -> float:
    """Milliseconds of a round trip, over the whole cycle."""
    total = sum(seconds for seconds, _ in profile.phases)
    if not total:
        return profile.phases[0][1].rtt_ms
    return sum(seconds * condition.rtt_ms for seconds, condition in profile.phases) / total


def lanes_for(step_ms: float, most: int) -> int:
    """So many conversations at a time that the processor still sleeps most of the time."""
    return max(1, min(most, int(step_ms // 8)))


class Grid:
    """Runs the cells of one step time in lanes."""

    def __init__(self, options: argparse.Namespace, bundles: Mapping[str, str]) -> None:
        self.options = options
        self._bundles = bundles
        _, _, self.prompts = client_kit.load(options)
        self.truth: list[list[int]] = []

    def devices(self) -> dict[str, Device]:
        """A set for a lane: a drafter holds the state of one conversation."""
        return {name: Device.load(folder, threads=1) for name, folder in self._bundles.items()}

    def learn(self) -> None:
        """What the target says, token by token, over no link."""
        with verifiers(0.0) as running:
            settings = ClientSettings(verifier=running.urls[0], max_new_tokens=self.options.tokens)
            device = self.devices()["moa"]
            answers = asyncio.run(ask_all(settings, device, self.prompts, draft="single", sync="off"))
            self.truth = [answer.ids for answer in answers]

    def step(self, step_ms: float, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """All cells at one step time, the longest first."""
        lanes = lanes_for(step_ms, self.options.lanes)
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        slow_first = sorted(cells, key=lambda cell: WAYS[cell.way].settings["draft"] not in ("single", "none"))
        for cell in slow_first:
            todo.put(cell)
        servers = {WAYS[cell.way].server for cell in cells}
        with ExitStack() as stack:
            emulated: dict[str, Running] = {}
            for server in sorted(servers):
                emulated[server] = stack.enter_context(
                    verifiers(step_ms, lanes, None if server == "moa" else self.options.eagle)
                )
            pids = [running.pid for running in emulated.values()]
            network = stack.enter_context(Network())
            pool = stack.enter_context(ThreadPoolExecutor(lanes))
            began, busy = time.perf_counter(), _cpu_seconds(pids)

            def work(lane: int) -> list[dict[str, Any]]:
                devices = self.devices()
                runs: list[dict[str, Any]] = []
                while True:
                    try:
                        cell = todo.get_nowait()
                    except queue.Empty:
                        return runs
                    way = WAYS[cell.way]
                    # By the way and the lane, every cell begins elsewhere in a link's cycle.
                    profile = client_kit.rotated(PROFILES[cell.link], lane / lanes + 0.37 * list(WAYS).index(cell.way))
                    url = network.link(emulated[way.server].urls[lane], profile)
                    runs.append(self._run(cell, step_ms, url, devices[way.bundle]))

            runs = [run for future in [pool.submit(work, lane) for lane in range(lanes)] for run in future.result()]
            seconds = time.perf_counter() - began
            share = (_cpu_seconds(pids) - busy) / seconds
        late = sum(r.late for r in emulated.values()) / max(1, sum(r.forwards for r in emulated.values()))
        for run in runs:
            run |= {"lanes": lanes, "cores_busy": round(share, 2), "late_forwards": round(late, 3)}
        print(
            f"{step_ms:g} ms: {len(runs)} cells in {seconds:.0f} s, {share:.2f} cores busy, {late:.0%} forwards late",
            file=sys.stderr,
        )
        return runs

    def _run(self, cell: Cell, step_ms: float, url: str, device: Device) -> dict[str, Any]:
        settings = ClientSettings(
            verifier=url, max_new_tokens=self.options.tokens, settle_seconds=60.0, **WAYS[cell.way].settings
        )
        answers, cpu = asyncio.run(_ask(settings, device, self.prompts))
        same = sum(answer.ids == ids for answer, ids in zip(answers, self.truth, strict=True))
        if same != len(answers):
            raise MoaError(f"{cell.way} over {cell.link} at {step_ms:g} ms: a text differs from the target's own")
        print(f"{step_ms:g} ms {cell.link} {cell.way}", file=sys.stderr)
        return {"link": cell.link, "step_ms": step_ms, "way": cell.way, "same": same, **figures(answers, cpu)}


async def _ask(
    settings: ClientSettings, device: Device, prompts: Sequence[Sequence[int]]
) -> tuple[list[TimedAnswer], float]:
    """The answers, and the CPU seconds of this thread, which is all that the device runs in."""
    async with EdgeClient(settings, device=device) as client:
        await client.wait_online(30)
        before = time.thread_time()
        answers = [await ask(client, ids) for ids in prompts]
        return answers, time.thread_time() - before


def figures(answers: Sequence[TimedAnswer], cpu_seconds: float) -> dict[str, float]:
    """What a cell shows."""
    total = {
        name: sum(answer.stats.get(name, 0) for answer in answers)
        for name in ("tokens", "seconds", "calls", "sent_bytes", "received_bytes", "offline_tokens", "retracted")
    }
    tokens = max(1, total["tokens"])
    firsts = sorted(answer.stats["first_token_seconds"] for answer in answers)
    return {
        "tokens": total["tokens"],
        "tokens_per_second": total["tokens"] / total["seconds"],
        "calls_per_100": 100 * total["calls"] / tokens,
        "up_bytes_per_token": total["sent_bytes"] / tokens,
        "down_bytes_per_token": total["received_bytes"] / tokens,
        "first_token_ms": 1000 * firsts[len(firsts) // 2],
        "edge_cpu_ms_per_token": 1000 * cpu_seconds / tokens,
        "provisional_tokens": total["offline_tokens"],
        "retracted_tokens": total["retracted"],
    }


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time of this process and those."""
    times = [psutil.Process(pid).cpu_times() for pid in pids] + [psutil.Process().cpu_times()]
    return sum(one.user + one.system for one in times)


def tables(result: Mapping[str, Any]) -> str:
    """Speed by step time and link, and what a way costs beside time."""
    runs = result["client_slow"]
    steps, links = (list(dict.fromkeys(run[key] for run in runs)) for key in ("step_ms", "link"))
    links.sort(key=lambda link: result["rtt_ms"][link])
    ways = [way for way in WAYS if any(run["way"] == way for run in runs)]
    found = {(run["step_ms"], run["link"], run["way"]): run for run in runs}
    parts = []
    for step in sorted(steps):
        rows = [[way, *(f"{found[step, link, way]['tokens_per_second']:.1f}" for link in links)] for way in ways]
        parts.append(
            f"**Tokens a second, {step:g} ms a forward (emulated)**\n\n{report.table(['way', *links], rows)}\n"
        )
    keys = {
        "calls per 100 tokens": ("calls_per_100", "{:.1f}"),
        "bytes up a token": ("up_bytes_per_token", "{:.0f}"),
        "bytes down a token": ("down_bytes_per_token", "{:.0f}"),
        "ms to the first token": ("first_token_ms", "{:.0f}"),
        "ms of CPU on the edge a token": ("edge_cpu_ms_per_token", "{:.2f}"),
    }
    step, link = sorted(steps)[len(steps) // 2], "4g" if "4g" in links else links[0]
    rows = [[way, *(form.format(found[step, link, way][key]) for key, form in keys.values())] for way in ways]
    parts.append(f"**Beside speed: {link}, {step:g} ms a forward**\n\n{report.table(['way', *keys], rows)}\n")
    same = sum(run["same"] for run in runs)
    parts.append(
        f"{same} of {len(runs) * result['prompts']} texts equal the target's own. Emulated: the links and the time "
        f"of a forward. {max(run['lanes'] for run in runs)} conversations at a time at most, "
        f"{max(run['cores_busy'] for run in runs):.1f} cores busy at most, and at most "
        f"{max(run['late_forwards'] for run in runs):.0%} of forwards took longer than stated. CPU on the edge is the "
        "client's own thread."
    )
    return "\n".join(parts)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole grid."""
    has = {"independent": options.independent.is_dir(), "eagle2": options.eagle.is_dir()}
    ways = [name for name, way in WAYS.items() if has.get(way.bundle, True) and has.get(way.server, True)]
    for name in WAYS:
        if name not in ways:
            print(f"left out, its drafter is not there: {name}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        bundles = {"moa": options.bundle}
        if has["independent"]:
            bundles["independent"] = _independent(options.independent, Path(folder) / "bundle")
        return _measure(options, bundles, ways)


def _independent(folder: Path, out: Path) -> str:
    """The folder itself when it is a bundle, or one made of the weights in it."""
    if (folder / "manifest.json").exists():
        return str(folder)
    from benchmarks.independent_bundle import build_independent  # the exporter takes seconds to import

    return str(build_independent(folder, str(paths().target), out))


def _measure(options: argparse.Namespace, bundles: Mapping[str, str], ways: Sequence[str]) -> dict[str, Any]:
    sys.setswitchinterval(0.0005)  # lanes share an interpreter
    grid = Grid(options, bundles)
    grid.learn()
    cells = [Cell(way, link) for way in ways for link in options.links]
    runs = [run for step in options.steps for run in grid.step(step, cells)]
    return {
        "prompts": len(grid.prompts),
        "tokens": options.tokens,
        "emulated": "links, and the time of a forward of the target",
        "rtt_ms": {link: mean_rtt(PROFILES[link]) for link in options.links},
        "client_slow": runs,
    }


def main() -> int:
    """Measure, print tables, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="", metavar="DIR", help="default: the embedded one")
    parser.add_argument("--independent", type=Path, default=WEIGHTS / "independent", metavar="DIR",
                        help="an independent drafter: weights, or a bundle")  # fmt: skip
    parser.add_argument("--eagle", type=Path, default=WEIGHTS / "eagle2", metavar="DIR", help="for the server")
    parser.add_argument("--steps", type=float, nargs="+", default=list(STEPS), metavar="MS")
    client_kit.add_links(parser)
    parser.add_argument("--lanes", type=int, default=12, help="conversations at a time at most (default: %(default)s)")
    parser.add_argument("--per-skill", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="a cell (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    options = parser.parse_args()
    if min(options.steps) <= 0 or options.lanes < 1 or options.prompts < 1:
        raise UsageError("--steps, --lanes and --prompts must be above 0")
    result = measure(options)
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_slow", main))
