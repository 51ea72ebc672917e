"""A verifier of a GGUF file that serves several clients through sockets: what a long prompt does to
another session's answer, and whether memory stays flat while clients come and go."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import say
from benchmarks.real.faults import Restarted
from benchmarks.real.lines import Lines
from benchmarks.real.writing import Task
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import AnswerSoFar
from edge_client.settings import ClientSettings
from moa.errors import MoaError

_ALONE = 24
"""Tokens of the answer before the prompt comes: its pace alone."""
_BEHIND = 8
"""Tokens behind the prompt's first token, then all is seen."""
_MOST = 2000
"""Tokens that the answer may have; it is stopped before."""
_PATIENCE = 1200.0
"""Seconds that anything may take: a long prompt on one core takes minutes."""
_SAMPLE = 10.0
"""Seconds between two looks at the memory."""
_DRAFTS = ("none", "auto", "device")
_WRONG = ("unverified", "short", "differ")
"""What an answer may be that is not as it should be."""


def _settings(url: str, draft: str, tokens: int, task: Task | None = None) -> ClientSettings:
    settings = ClientSettings(
        verifier=url,
        draft=draft,  # type: ignore[arg-type]
        max_new_tokens=tokens,
        ignore_eos=True,
        settle_seconds=_PATIENCE,
        answer_seconds=_PATIENCE,
        # No device goes on alone: what is measured is the verifier.
        offline_after=_PATIENCE,
    )
    if task is None:
        return settings
    return replace(settings, temperature=task.sampling.temperature, seed=task.sampling.seed)


# ---- a long prompt beside an answer


@dataclass
class _Beside:
    """The times at which the answer's tokens came, and the prompt's begin and end."""

    seen: list[float]
    began: float = 0.0
    ended: float = 0.0

    def gaps(self, *, beside: bool) -> list[float]:
        """Seconds between two tokens, while the prompt was read or before."""
        return [
            now - before
            for before, now in itertools.pairwise(self.seen)
            if (self.began <= before < self.ended if beside else now <= self.began)
        ]


async def beside(
    target: str, bundle: Path, ids: Sequence[int], out: Lines, *, threads: int
) -> None:
    """One session answers; then another one brings the prompt `ids`. Nobody drafts."""
    name = f"{Path(target).name}/{len(ids)}"
    if name in out:
        return
    flags = [f"--target={target}", f"--threads={threads}", "--slots=2"]
    flags += [f"--max-context-tokens={len(ids) + _MOST}", f"--max-prompt-tokens={len(ids) + 1}"]
    server = Restarted(flags)
    device = Device.load(bundle, threads=1)
    with server.running():
        url = f"ws://127.0.0.1:{server.port}"
        found = _Beside([])
        first = asyncio.Event()

        async def answer() -> None:
            async with EdgeClient(_settings(url, "none", _MOST), device=device) as client:
                await client.wait_online(120)
                text = AnswerSoFar()
                known = 0
                async for event in client.generate(ids=list(ids[:_ALONE])):
                    text.take(event)
                    if len(text.ids) > known:
                        found.seen.append(time.monotonic())
                    known = len(text.ids)
                    if len(text.ids) >= _ALONE:
                        first.set()
                    if found.ended and sum(at > found.ended for at in found.seen) >= _BEHIND:
                        return

        async def read() -> None:
            await first.wait()
            async with EdgeClient(_settings(url, "none", 1), device=device) as client:
                await client.wait_online(120)
                found.began = time.monotonic()
                async for _ in client.generate(ids=list(ids)):
                    pass
                found.ended = time.monotonic()

        async with asyncio.timeout(2 * _PATIENCE):
            await asyncio.gather(answer(), read())
    alone = found.gaps(beside=False)
    during = found.gaps(beside=True)
    if not alone or not during:
        raise MoaError("the answer was not seen before and beside the prompt")
    out.add(
        name,
        target=Path(target).name,
        prompt=len(ids),
        prompt_seconds=found.ended - found.began,
        alone_ms=1000 * median(alone),
        beside_ms=1000 * median(during),
        longest_ms=1000 * max(during),
        tokens_beside=len(during),
    )
    say(f"{name}: {out.found[name]}")


# ---- clients that come and go


async def crowd(
    target: str,
    bundle: Path,
    tasks: Sequence[Task],
    out: Lines,
    *,
    clients: int,
    minutes: float,
    threads: int,
) -> None:
    """So many clients ask one question after another, each over a new connection, for so long. A
    line every few seconds says what the verifier has in memory. A run that was killed cannot go
    on, because its verifier is gone: each run begins anew, under a number of its own."""
    run = 1 + sum(key.endswith("/start") for key in out.found)
    flags = [f"--target={target}", f"--threads={threads}", f"--slots={clients}"]
    flags += ["--max-context-tokens=1024"]
    server = Restarted(flags)
    device = Device.load(bundle, threads=1)
    counts = Counter[str]()
    texts: dict[str, list[int]] = {}
    questions = itertools.cycle(tasks)
    with server.running():
        url = f"ws://127.0.0.1:{server.port}"
        began = time.monotonic()
        until = began + 60 * minutes

        def note(name: str, **facts: int) -> None:
            out.add(
                f"{run}/{name}",
                second=time.monotonic() - began,
                megabytes=_resident(server),
                answers=counts["answers"],
                **facts,
            )

        note("start")

        async def ask(drafts: Iterator[str]) -> None:
            while time.monotonic() < until:
                task = next(questions)
                answer = AnswerSoFar()
                settings = _settings(url, next(drafts), task.tokens, task)
                async with EdgeClient(settings, device=device) as client:
                    await client.wait_online(120)
                    async for event in client.generate(ids=task.ids):
                        answer.take(event)
                _judge(task, answer, texts, counts)

        async def watch() -> None:
            for number in itertools.count(1):
                await asyncio.sleep(_SAMPLE)
                if time.monotonic() >= until:
                    return
                note(f"{number}")

        orders = [itertools.cycle(_DRAFTS[n % 3 :] + _DRAFTS[: n % 3]) for n in range(clients)]
        await asyncio.gather(watch(), *(ask(order) for order in orders))
        note("end", clients=clients, **{name: counts[name] for name in _WRONG})
    say(f"crowd: {out.found[f'{run}/end']}")


def _judge(
    task: Task, answer: AnswerSoFar, texts: dict[str, list[int]], counts: Counter[str]
) -> None:
    """Whether all of an answer is there, verified, and what the same question got before."""
    counts["answers"] += 1
    counts["unverified"] += answer.done is None or not answer.done.verified
    counts["short"] += len(answer.ids) != task.tokens
    counts["differ"] += texts.setdefault(task.key, answer.ids) != answer.ids


def _resident(server: Restarted) -> float:
    """Megabytes of the verifier."""
    if server.process is None:
        raise MoaError("the verifier is not running")
    return float(psutil.Process(server.process.pid).memory_info().rss) / 1e6


# ---- tables

_BESIDE: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "target": "{target}",
    "prompt": "{prompt} tokens",
    "read in": "{prompt_seconds:.0f} s",
    "gap between tokens alone": "{alone_ms:.0f} ms",
    "beside the prompt": "{beside_ms:.0f} ms",
    "longest beside it": "{longest_ms:.0f} ms",
}


def beside_figures(out: Lines) -> dict[str, Any]:
    """As they were found."""
    return {"runs": list(out.found.values())}


def beside_tables(result: dict[str, Any]) -> str:
    """A line for each prompt."""
    return listing(result["runs"], _BESIDE)


def crowd_figures(out: Lines) -> dict[str, Any]:
    """Memory by time, and what became of the answers, of the newest run that came to its end."""
    ended = [key for key in out.found if key.endswith("/end")]
    if not ended:
        return {"runs": []}
    run = ended[-1].removesuffix("end")
    *samples, end = (line for key, line in out.found.items() if key.startswith(run))
    return {"runs": [end], "samples": samples}


def crowd_tables(result: dict[str, Any]) -> str:
    """Memory each minute, and the counts."""
    (end,) = result["runs"]
    every_minute: list[dict[str, Any]] = []
    for sample in result["samples"]:
        if not every_minute or sample["second"] - every_minute[-1]["second"] >= 59:
            every_minute.append(sample)
    every_minute.append(end)
    columns: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
        "after": "{second:.0f} s",
        "resident": "{megabytes:.0f} MB",
        "answers so far": "{answers}",
    }
    said = (
        f"{end['answers']} answers of {end['clients']} clients: {end['unverified']} not verified in"
        f" the end, {end['short']} without all their tokens, {end['differ']} unlike the same"
        " question's answer before."
    )
    return f"{titled(('Memory', listing(every_minute, columns)))}\n\n{said}"
