"""Answers through sockets, greedy and sampled, drafted by the device, by the server, by nobody and by
whom `auto` chooses, with cuts and kills: is every text the target's own, and all of it verified?

A text is the target's own if the target, alone and afterwards, chooses each of its tokens behind
those before it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.real.lines import Lines
from benchmarks.real.writing import Task
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import AnswerSoFar
from edge_client.settings import ClientSettings
from edge_client.tools.emulated_network import LinkProxy
from moa.errors import MoaError
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import LoadOptions, Target
from moa.target.registry import source_of
from moa.target.rows import Row

DRAFTS = ("device", "server", "none", "auto")
_CUTS = 0.6
"""Share of the answers whose connection is reset in the middle."""
_KILLS = 0.2
"""Share of the answers in the middle of which the verifier is killed with signal 9, and started
again."""
_CONTEXT = 1024
"""Tokens of prompt and answer, at most."""


class Restarted:
    """A verifier that can be killed and comes back on the same port."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._flags = flags
        self._environment = {**os.environ, **(environment or {})}
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @classmethod
    def of(cls, target: str, flags: Sequence[str], *, threads: int) -> Restarted:
        """Of this target, by so many threads; 0: as many as it chooses."""
        # The verifier has a flag for it, which only a GGUF file takes.
        environment = {"OMP_NUM_THREADS": f"{threads}"} if threads else {}
        return cls([f"--target={target}", *flags], environment)

    def start(self) -> None:
        """Start, and wait for the line with its address."""
        command = [sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve"]
        command += ["--log-level=error", f"--port={self.port}", *self._flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self._environment
        )
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        urls = [word for word in line.split() if word.startswith("ws://")]
        if not urls:
            raise MoaError("the verifier did not start", hint="what it said is above")
        self.port = int(urls[0].rpartition(":")[2].rstrip("/"))

    def kill(self) -> None:
        """As a crash."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For as long as the context lasts."""
        try:
            self.start()  # in here: what ends the experiment may come while a model is loaded
            yield
        finally:
            self.kill()


@dataclass(frozen=True)
class Fault:
    """What happens after so many tokens of an answer."""

    kind: str
    after: int


def fault_of(task: Task, tokens: int) -> Fault:
    """The same in every run."""
    rng = random.Random(task.key)
    draw = rng.random()
    after = rng.randint(1, max(1, tokens - 4))
    if draw < _CUTS:
        return Fault("cut", after)
    if draw < _CUTS + _KILLS:
        return Fault("kill", after)
    return Fault("none", after)


def drafting_of(task: Task, *, server: bool) -> str:
    """Who drafts an answer, the same in every run; the server only where it has what drafts."""
    drafts = [draft for draft in DRAFTS if server or draft != "server"]
    return drafts[zlib.crc32(f"{task.key} draft".encode()) % len(drafts)]


async def ask(
    target: str,
    bundle: Path,
    tasks: Sequence[Task],
    out: Lines,
    *,
    threads: int,
    server_drafter: str = "",
) -> None:
    """Every answer that is not in `out` yet. `server_drafter` is a small model beside the target, as
    `--server-drafter` names it."""
    device = Device.load(bundle, threads=threads)
    missing = [task for task in tasks if task.key not in out]
    progress = Progress(len(missing), "answers")
    flags = ["--slots=2", f"--max-context-tokens={_CONTEXT}", f"--kv-tokens={2 * _CONTEXT}"]
    if not _is_gguf(target):
        flags += ["--device=cpu", "--dtype=float32"]
    if server_drafter:
        flags.append(f"--server-drafter={server_drafter}")
    server = Restarted.of(target, flags, threads=threads)
    with server.running():
        for number, task in enumerate(missing):
            draft = drafting_of(task, server=bool(server_drafter))
            async with LinkProxy("127.0.0.1", server.port, seed=number) as link:
                found = await _answer(device, link, server, task, draft)
            out.add(task.key, draft=draft, temperature=task.sampling.temperature, **found)
            progress.step()


def options_of(target: str, *, threads: int) -> LoadOptions:
    """How the target that judges is loaded: as the verifier's, a folder or hub id in float32 on a
    CPU."""
    if _is_gguf(target):
        return LoadOptions(slots=1, capacity=_CONTEXT, threads=threads)
    return LoadOptions(device="cpu", dtype="float32", slots=1, capacity=_CONTEXT)


def _is_gguf(target: str) -> bool:
    return source_of(target).name == "gguf"


def judge(target: Target, tasks: Sequence[Task], asked: Lines, out: Lines) -> None:
    """Whether the target alone chooses every token of each text."""
    for task in tasks:
        if task.key not in asked or task.key in out:
            continue
        ids = asked.found[task.key]["ids"]
        out.add(task.key, same=len(ids) == task.tokens and own(target, task, ids))


def own(target: Target, task: Task, ids: Sequence[int]) -> bool:
    """Whether it would have written this."""
    slot = target.cache.acquire()
    try:
        known = task.ids[:-1]
        if known:
            step = target.forward([Row.chain(slot, known, judged="none")])
            target.commit(step, 0, range(len(known)))
        chain = [task.ids[-1], *ids[:-1]]
        row = Row.chain(slot, chain, judged="all")
        step = target.forward([row])
        (found,) = accept_rows(step, [Judged(chain, row.parents, task.ids, task.sampling)])
        return len(found.path) == len(chain) and found.next_token == ids[-1]
    finally:
        target.cache.release(slot)


async def _answer(
    device: Device, link: LinkProxy, server: Restarted, task: Task, draft: str
) -> dict[str, Any]:
    fault = fault_of(task, task.tokens)
    settings = ClientSettings(
        verifier=link.url,
        draft=draft,  # type: ignore[arg-type]
        temperature=task.sampling.temperature,
        seed=task.sampling.seed,
        max_new_tokens=task.tokens,
        ignore_eos=True,
        settle_seconds=300.0,
        answer_seconds=300.0,
    )
    answer = AnswerSoFar()
    happened = ""
    back: asyncio.Task[None] | None = None
    async with EdgeClient(settings, device=device) as client:
        await client.wait_online(120)
        async for event in client.generate(ids=task.ids):
            answer.take(event)
            if not happened and fault.kind != "none" and len(answer.ids) >= fault.after:
                happened = fault.kind
                if fault.kind == "cut":
                    link.cut()
                else:
                    server.kill()
                    back = asyncio.create_task(asyncio.to_thread(server.start))
    if back is not None:
        await back
    if answer.done is None:
        raise MoaError(f"{task.key}: the answer never ended")
    return {
        "ids": answer.ids,
        "verified": answer.done.verified,
        "reason": answer.done.reason,
        "fault": happened,
    }


def figures(asked: Lines, judged: Lines) -> dict[str, Any]:
    """By who drafts and the temperature."""
    runs = []
    for draft in DRAFTS:
        for temperature in (0.0, 1.0):
            ones = [
                {**line, **judged.found[key]}
                for key, line in asked.found.items()
                if (line["draft"], line["temperature"]) == (draft, temperature) and key in judged
            ]
            if ones:
                runs.append(
                    {
                        "draft": draft,
                        "temperature": temperature,
                        "answers": len(ones),
                        "cuts": sum(line["fault"] == "cut" for line in ones),
                        "kills": sum(line["fault"] == "kill" for line in ones),
                        "same": sum(line["same"] for line in ones),
                        "verified": sum(line["verified"] for line in ones),
                    }
                )
    return {"runs": runs}


_COUNTED = ("answers", "cuts", "kills", "same", "verified")


def tables(result: dict[str, Any]) -> str:
    """A line for each."""
    rows = [
        [run["draft"], f"{run['temperature']:g}", *(run[part] for part in _COUNTED)]
        for run in result["runs"]
    ]
    total = [sum(run[part] for run in result["runs"]) for part in _COUNTED]
    header = ["drafts", "T", "answers", "cuts", "kills"]
    header += ["the target's own text", "verified in the end"]
    return table(header, [*rows, ["**all**", "", *total]])
