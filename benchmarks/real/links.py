"""Where a device that drafts pays: every way of decoding over links and times of a forward.

Answers and guesses are the real pair's, looked up (`benchmarks.real.recorded`); emulated are the
link, the time of the target's forward and the time of the device's step. Both ends, the wire, and
who drafts when are the product's. In a cell every prompt is answered in all ways in turn; every text
is compared with the recorded one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device import winners
from benchmarks.device.grid import Answers, Network
from benchmarks.kit.figures import pivot, titled
from benchmarks.kit.lab import mean_rtt, turned
from benchmarks.kit.progress import Progress
from benchmarks.real.acceptance import standard_error
from benchmarks.real.lines import Lines
from benchmarks.real.recorded import RecordedGraph, Text, texts
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Event, Token
from edge_client.settings import ClientSettings
from edge_client.tools.compare import ask
from edge_client.tools.emulated_network import PROFILES
from edge_client.turn.step_thread import StepThread
from moa.errors import MoaError
from moa.graph.drafter import OnnxDrafter

WAYS: dict[str, dict[str, Any]] = {
    "plain API streaming": {"draft": "none", "sync": "off"},
    "device": {"draft": "device"},
    "server-drafted": {"draft": "server"},
    "auto": {"draft": "auto"},
}
LINKS = ("loopback", "wifi", "5g", "4g", "4g-weak")
STEPS_MS = (10.0, 30.0, 60.0, 120.0, 230.0)
_NOT_KEPT = ("edge_cpu_ms_per_token", "server_seconds", "first_ms", "gaps_ms")
"""Not measured here, or told by other figures."""
_CPU = "**Milliseconds of CPU"
BESIDE = "server-drafted, {}"
"""The way in which another drafter than the sibling drafts at the server."""
STEP_MS = 17.0
TOKEN_MS = 5.5
"""The int4 sibling on two cores with AVX-512 takes 22.5, 37, 57 and 105 ms for 1, 4, 8 and 16
tokens: about so much a step, and for each of its tokens."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared."""

    prompts: int = 10
    tokens: int = 48
    links: Sequence[str] = LINKS
    steps_ms: Sequence[float] = STEPS_MS
    step_ms: float = STEP_MS
    token_ms: float = TOKEN_MS
    drafter: str = ""
    """Another drafter for the server, by its name in `drafts.jsonl`."""

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """By name how to decode."""
        return WAYS | ({BESIDE.format(self.drafter): {"draft": "server"}} if self.drafter else {})


@dataclass
class _Servers:
    urls: list[list[str]]
    """Of each lane the verifier beside the sibling, and then that beside another drafter."""
    process: subprocess.Popen[str]
    forwards: int = 0
    late: int = 0


@dataclass
class _Way(Answers):
    """The answers of a way in a cell, and when their tokens were shown."""

    first_ms: list[float] = field(default_factory=list)
    """By prompt, from the question to the first token."""
    gaps_ms: list[list[float]] = field(default_factory=list)
    """By prompt, between every token and the one before it."""

    def waits(self) -> dict[str, Any]:
        """As a line keeps them."""
        return {"first_ms": self.first_ms, "gaps_ms": self.gaps_ms}


@dataclass
class _Shown:
    """When the tokens of an answer are shown."""

    began: float = field(default_factory=time.perf_counter)
    at: list[float] = field(default_factory=list)

    def see(self, event: Event) -> None:
        """A token's moment."""
        if isinstance(event, Token):
            self.at.append(time.perf_counter())

    def note(self, way: _Way) -> None:
        """Add this answer's waits."""
        way.first_ms.append(round(1000 * (self.at[0] - self.began), 1))
        way.gaps_ms.append([round(1000 * (b - a), 1) for a, b in pairwise(self.at)])


def measure(work: Path, bundle: Path, settings: Settings) -> None:
    """Every cell that is not in `links.jsonl` yet, the slowest forwards first."""
    out = Lines(work / "links.jsonl")
    known = texts(work, settings.prompts, settings.tokens, settings.drafter)
    if not known:
        more = f", and `drafts` with {settings.drafter}" if settings.drafter else ""
        raise MoaError(
            "no greedy answers with guesses are long enough",
            hint=f"run `answers` and `guesses`{more}",
        )
    device = Device.load(bundle)
    progress = Progress(len(settings.links) * len(settings.steps_ms), "cells")
    sys.setswitchinterval(0.0005)  # lanes share an interpreter
    for forward_ms in sorted(settings.steps_ms, reverse=True):
        missing = [link for link in settings.links if f"{forward_ms:g}/{link}" not in out]
        if not missing:
            continue
        with (
            _serving(work, bundle, settings, forward_ms, len(missing)) as servers,
            Network() as network,
            ThreadPoolExecutor(len(missing)) as pool,
        ):

            def cell(
                number: int,
                links: Sequence[str] = missing,
                urls: Sequence[Sequence[str]] = servers.urls,
                network: Network = network,
            ) -> dict[str, _Way]:
                profile = turned(PROFILES[links[number]], 0.37 * number)
                with contextlib.ExitStack() as stack:
                    behind = [
                        stack.enter_context(network.link(url, profile)).url for url in urls[number]
                    ]
                    return asyncio.run(_in_turn(device, known, behind, settings))

            cells = list(pool.map(cell, range(len(missing))))
        late = round(servers.late / max(1, servers.forwards), 3)
        for link, found in zip(missing, cells, strict=True):
            runs = {way: answers.figures() | answers.waits() for way, answers in found.items()}
            out.add(
                f"{forward_ms:g}/{link}",
                step_ms=forward_ms,
                link=link,
                late=late,
                kinds=[text.kind for text in known],
                tokens=settings.tokens,
                runs=runs,
            )
            progress.step(f"{forward_ms:g} ms, {link}")


@contextlib.contextmanager
def _serving(
    work: Path, bundle: Path, settings: Settings, forward_ms: float, lanes: int
) -> Iterator[_Servers]:
    command = [sys.executable, "-m", "benchmarks.real.emulated", str(work)]
    command += [f"--bundle={bundle}", f"--step-ms={forward_ms}", f"--lanes={lanes}"]
    command += [f"--texts={settings.prompts}", f"--tokens={settings.tokens}"]
    command += [f"--drafter={settings.drafter}"]
    each = 2 if settings.drafter else 1
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        urls = process.stdout.readline().split() if process.stdout is not None else []
        if len(urls) != each * lanes:
            raise MoaError("the verifiers did not start", hint="what they said is above")
        servers = _Servers([urls[lane::lanes] for lane in range(lanes)], process)
        yield servers
        process.terminate()
        said, _ = process.communicate(timeout=60)
        servers.forwards, servers.late = map(int, said.split()[-2:])
    finally:
        process.kill()
        process.communicate()


async def _in_turn(
    device: Device, known: Sequence[Text], urls: Sequence[str], settings: Settings
) -> dict[str, _Way]:
    found = {way: _Way() for way in settings.ways}
    vocabulary = device.bundle.manifest.vocabulary.target

    def new_drafter() -> OnnxDrafter:
        graph = RecordedGraph(known, settings.step_ms, settings.token_ms)
        return OnnxDrafter(graph, vocab_size=vocabulary)

    recorded = dataclasses.replace(
        device,
        new_drafter=new_drafter,
        thread=StepThread(),
    )
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for name, way in settings.ways.items():
            asked = ClientSettings(
                verifier=urls[0] if name in WAYS else urls[1],
                max_new_tokens=settings.tokens,
                settle_seconds=60.0,
                offline_after=30.0,
                **way,
            )
            clients[name] = await stack.enter_async_context(EdgeClient(asked, device=recorded))
            await clients[name].wait_online(60)
        names = list(clients)
        for number, text in enumerate(known):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                shown = _Shown()
                answer = await ask(clients[name], text.prompt, shown.see)
                if answer.ids != text.answer[: settings.tokens]:
                    raise MoaError(f"{name}, prompt {number}: not the recorded text")
                one = found[name]
                one.seconds.append([answer.stats["seconds"]])
                one.server_seconds.append([0.0])
                one.all.append(answer)
                shown.note(one)
    return found


def figures(found: Lines) -> dict[str, Any]:
    """As `benchmarks.device.winners` reads a grid."""
    cells = sorted(found.found.values(), key=lambda cell: (cell["step_ms"], cell["link"]))
    links = [link for link in LINKS if any(cell["link"] == link for cell in cells)]
    runs = []
    for cell in cells:
        for way, run in cell["runs"].items():
            waits = _waits(run["first_ms"], run["gaps_ms"]) if "gaps_ms" in run else {}
            runs.append(
                {
                    "step_ms": cell["step_ms"],
                    "link": cell["link"],
                    "temperature": 0.0,
                    "way": way,
                    **{name: value for name, value in run.items() if name not in _NOT_KEPT},
                    **waits,
                }
            )
    return {
        "prompts": len(cells[0]["kinds"]),
        "tokens": cells[0]["tokens"],
        "repeats": 1,
        "kinds": cells[0]["kinds"],
        "rtt_ms": {link: mean_rtt(PROFILES[link]) for link in links},
        "steps": [],
        "late": {f"{cell['step_ms']:g}": cell["late"] for cell in cells},
        "runs": runs,
    }


TAILS = (95, 99)
"""Percentiles of the time between two shown tokens."""
_RESAMPLED = 200


def _waits(first_ms: Sequence[float], gaps_ms: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What a reader waits for, with standard errors over the texts: the mean time to the first
    token, and percentiles of all times between two tokens."""
    found: dict[str, Any] = {
        "texts": len(first_ms),
        "first_ms": round(statistics.fmean(first_ms), 1),
        "first_ms_se": round(standard_error(first_ms), 1),
    }
    # Gaps of one text hang together, so that whole texts are drawn again.
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(gaps_ms), (_RESAMPLED, len(gaps_ms)))
    again = [np.concatenate([gaps_ms[text] for text in some]) for some in drawn]
    for tail in TAILS:
        found[f"p{tail}_ms"] = round(float(np.percentile(np.concatenate(gaps_ms), tail)), 1)
        spread = np.std([np.percentile(gaps, tail) for gaps in again], ddof=1)
        found[f"p{tail}_ms_se"] = round(float(spread), 1)
    return found


def _waiting(result: dict[str, Any]) -> list[str]:
    """A table for each time of a forward, where waits were measured."""
    parts = []
    for step in dict.fromkeys(run["step_ms"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["step_ms"] == step and "p95_ms" in run]
        if runs:
            title = (
                "Milliseconds to the first token; 95th / 99th percentile of those between two shown"
                f" tokens, {step:g} ms a forward"
            )
            parts.append((title, pivot(runs, "way", "link", _waited, "", list(result["rtt_ms"]))))
    return [titled(*parts)] if parts else []


def _waited(run: Mapping[str, Any]) -> str:
    cells = [
        f"{run[f'{name}_ms']:.0f} ± {run[f'{name}_ms_se']:.0f}" for name in ("first", "p95", "p99")
    ]
    return f"{cells[0]}; {cells[1]} / {cells[2]}"


def tables(result: dict[str, Any]) -> str:
    """As of any grid, without what is not measured here: processor time."""
    shown = {
        **result,
        "runs": [
            {"edge_cpu_ms_per_token": 0.0, "server_seconds": [], **run} for run in result["runs"]
        ],
    }
    blocks = winners.tables(shown).split("\n\n")
    kept = [
        block
        for before, block in zip(["", *blocks], blocks, strict=False)
        if not block.startswith(_CPU) and not before.startswith(_CPU)
    ]
    kept += _waiting(result)
    late = ", ".join(f"{share:.0%} at {step} ms" for step, share in result["late"].items())
    kept.append(
        "Links, the time of a forward and the time of the device's step are emulated; answers and "
        f"guesses are looked up. Forwards that took longer than stated: {late}."
    )
    return "\n\n".join(kept)
