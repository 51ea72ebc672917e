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
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.device import winners
from benchmarks.device.grid import Answers, Network
from benchmarks.kit.lab import mean_rtt, turned
from benchmarks.kit.progress import Progress
from benchmarks.real.lines import Lines
from benchmarks.real.recorded import RecordedGraph, Text, texts
from edge_client.client import EdgeClient
from edge_client.device import Device
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
_NOT_MEASURED = ("edge_cpu_ms_per_token", "server_seconds")
_CPU = "**Milliseconds of CPU"
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


@dataclass
class _Servers:
    urls: list[str]
    process: subprocess.Popen[str]
    forwards: int = 0
    late: int = 0


@dataclass
class _Cell:
    found: dict[str, Answers] = field(default_factory=dict)


def measure(work: Path, bundle: Path, settings: Settings) -> None:
    """Every cell that is not in `links.jsonl` yet, the slowest forwards first."""
    out = Lines(work / "links.jsonl")
    known = texts(work, settings.prompts, settings.tokens)
    if not known:
        raise MoaError(
            "no greedy answers with guesses are long enough", hint="run `answers` and `guesses`"
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
                urls: Sequence[str] = servers.urls,
                network: Network = network,
            ) -> dict[str, Answers]:
                profile = turned(PROFILES[links[number]], 0.37 * number)
                with network.link(urls[number], profile) as link:
                    return asyncio.run(_in_turn(device, known, link.url, settings))

            cells = list(pool.map(cell, range(len(missing))))
        late = round(servers.late / max(1, servers.forwards), 3)
        for link, found in zip(missing, cells, strict=True):
            runs = {way: answers.figures() for way, answers in found.items()}
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        urls = process.stdout.readline().split() if process.stdout is not None else []
        if len(urls) != lanes:
            raise MoaError("the verifiers did not start", hint="what they said is above")
        servers = _Servers(urls, process)
        yield servers
        process.terminate()
        said, _ = process.communicate(timeout=60)
        servers.forwards, servers.late = map(int, said.split()[-2:])
    finally:
        process.kill()
        process.communicate()


async def _in_turn(
    device: Device, known: Sequence[Text], url: str, settings: Settings
) -> dict[str, Answers]:
    found = {way: Answers() for way in WAYS}
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
        for name, way in WAYS.items():
            asked = ClientSettings(
                verifier=url,
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
                answer = await ask(clients[name], text.prompt)
                if answer.ids != text.answer[: settings.tokens]:
                    raise MoaError(f"{name}, prompt {number}: not the recorded text")
                one = found[name]
                one.seconds.append([answer.stats["seconds"]])
                one.server_seconds.append([0.0])
                one.all.append(answer)
    return found


def figures(found: Lines) -> dict[str, Any]:
    """As `benchmarks.device.winners` reads a grid."""
    cells = sorted(found.found.values(), key=lambda cell: (cell["step_ms"], cell["link"]))
    links = [link for link in LINKS if any(cell["link"] == link for cell in cells)]
    runs = []
    for cell in cells:
        for way, run in cell["runs"].items():
            runs.append(
                {
                    "step_ms": cell["step_ms"],
                    "link": cell["link"],
                    "temperature": 0.0,
                    "way": way,
                    **{name: value for name, value in run.items() if name not in _NOT_MEASURED},
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
    late = ", ".join(f"{share:.0%} at {step} ms" for step, share in result["late"].items())
    kept.append(
        "Links, the time of a forward and the time of the device's step are emulated; answers and "
        f"guesses are looked up. Forwards that took longer than stated: {late}."
    )
    return "\n\n".join(kept)
