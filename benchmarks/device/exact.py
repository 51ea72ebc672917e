"""Checks that every text equals the target's own: over every link, device- and server-drafted, with any records.

Held-out prompts are answered greedily and sampled over every emulated link; who drafts and how records are synced
changes from prompt to prompt so that every combination occurs. Many conversations run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.device.replay import fresh_drafter, record_heads, with_drafter
from benchmarks.kit.figures import pivot
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.options import one_of
from benchmarks.kit.progress import Progress, say, steps
from benchmarks.kit.truth import Truth, read
from demo.skills import SKILLS
from edge_client.tools.emulated_network import PROFILES
from moa.graph.cache import RecordBuffer
from moa.graph.step import Heads
from moa.sampling import SamplingSettings

DRAFTS = ("device", "server", "auto")
SYNCS = ("off", "int8", "int4", "late")
"""Records: none, precise, coarse, or used `_LATE_SECONDS` after they have arrived."""
SAMPLINGS = ("greedy", "sampled")
_LATE_SECONDS = 0.5
_AT_ONCE = 32
_PATIENCE: dict[str, Any] = {
    # Dozens of conversations share two cores here, so answers are slow but not lost.
    "offline_after": 20.0,
    "settle_seconds": 60.0,
    "reconnect_seconds": 0.5,
}


class LateBuffer(RecordBuffer):
    """Records that the drafter sees only a while after they have arrived."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads)
        self._waiting: deque[tuple[float, int, NDArray[np.float32], NDArray[np.float32]]] = deque()

    def put(self, start: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Take records in, later."""
        self._waiting.append((time.perf_counter() + _LATE_SECONDS, start, keys, values))

    def truncate(self, length: int) -> None:
        """Forget the records of positions from `length` on, those that wait as well."""
        super().truncate(length)
        self._waiting = deque(
            (due, at, k[: length - at], v[: length - at]) for due, at, k, v in self._waiting if at < length
        )

    def feeds(self) -> dict[str, NDArray[np.float32]]:
        """The graph's record inputs, with what is due by now."""
        while self._waiting and self._waiting[0][0] <= time.perf_counter():
            _, start, keys, values = self._waiting.popleft()
            super().put(start, keys, values)
        return super().feeds()


@dataclass(frozen=True)
class Case:
    """One answer to be had."""

    link: str
    draft: str
    sync: str
    sampling: str
    prompt: int

    @property
    def settings(self) -> SamplingSettings:
        """How its tokens are chosen."""
        if self.sampling == "greedy":
            return SamplingSettings()
        return SamplingSettings(temperature=0.8, top_p=0.95, seed=self.prompt)


def cases(links: Sequence[str], prompts: int) -> list[Case]:
    """Every prompt greedy and sampled over every link; the ways take turns, with another offset each time."""
    ways = list(product(DRAFTS, SYNCS))
    found = []
    for row, (link, sampling) in enumerate(product(links, SAMPLINGS)):
        for prompt in range(prompts):
            draft, sync = ways[(prompt + 5 * row) % len(ways)]
            found.append(Case(link, draft, sync, sampling, prompt))
    random.Random(0).shuffle(found)
    return found


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """How many prompts over which links."""

    per_skill: int = -(-100 // len(SKILLS))
    """Held-out prompts of every skill."""
    prompts: int = 100
    """Of these so many, of all kinds; each is answered greedily and sampled over every link."""
    tokens: int = 48
    """Tokens of an answer at most."""
    links: tuple[str, ...] = one_of(tuple(PROFILES), PROFILES)


async def measure(options: Options) -> dict[str, Any]:
    """All cases, many at once."""
    outcomes: Counter[tuple[Case, str]] = Counter()
    figures: Counter[str] = Counter()
    gate = asyncio.Semaphore(_AT_ONCE)
    with open_lab(options, slots=_AT_ONCE) as lab:
        todo = cases(options.links, len(lab.prompts))
        truth = Truth(options.target, eos_ids=lab.device.codec.eos_ids, tokens=options.tokens)
        for number, sampling in steps({(case.prompt, case.settings) for case in todo}, "target-only decoding"):
            truth.answer(lab.prompts[number], sampling)  # in advance: the conversations should not wait for it
        progress, heads = Progress(len(todo), "answers"), record_heads(lab.device)
        async with contextlib.AsyncExitStack() as stack:
            proxies = {name: await stack.enter_async_context(lab.link(name)) for name in options.links}

            async def answer(case: Case) -> None:
                """One conversation of its own, over a connection of its own."""
                buffer = LateBuffer(heads) if case.sync == "late" else RecordBuffer(heads)
                device = with_drafter(lab.device, lambda: fresh_drafter(lab.device, buffer))
                settings: dict[str, Any] = {"draft": case.draft, "sync": case.sync.replace("late", "int8"), **_PATIENCE}
                settings |= {"max_new_tokens": options.tokens, **dataclasses.asdict(case.settings)}
                ids = lab.prompts[case.prompt]
                async with gate, lab.client(proxies[case.link], device=device, online=False, **settings) as client:
                    said = await read(client, ids)
                outcome = truth.judge(ids, case.settings, said.tokens) if all(said.verified) else "unverified"
                outcomes[case, outcome] += 1
                assert said.done is not None
                for name in ("tokens", "calls", "offline_tokens", "retracted", "resumes", "record_rows"):
                    figures[name] += said.done.stats[name]
                if outcome != "same":
                    say(f"{outcome}: {case}")
                progress.step()

            await asyncio.gather(*map(answer, todo))
    combinations: dict[tuple[str, ...], Counter[str]] = {}
    for (case, outcome), times in outcomes.items():
        key = case.link, case.draft, case.sync, case.sampling
        combinations.setdefault(key, Counter())[outcome] += times
    names = ("link", "draft", "sync", "sampling")
    return {
        "prompts": len(lab.prompts),
        "tokens": options.tokens,
        "at_once": _AT_ONCE,
        "answers": outcomes.total(),
        "totals": {name: sum(n for (_, o), n in outcomes.items() if o == name) for name in ("same", "tie")},
        "faults": sum(n for (_, outcome), n in outcomes.items() if outcome not in ("same", "tie")),
        "figures": dict(figures),
        "runs": [
            dict(zip(names, key, strict=True)) | {"outcomes": dict(counts)}
            for key, counts in sorted(combinations.items())
        ],
    }


def tables(result: Mapping[str, Any]) -> str:
    """Answers by combination: how many there were, and how many of them were the target's own where not all."""

    def cell(run: Mapping[str, Any]) -> str:
        same, asked = run["outcomes"].get("same", 0), sum(run["outcomes"].values())
        return str(same) if same == asked else f"{same} of {asked}"

    runs = [
        run | {"row": f"{run['link']}, {run['draft']}", "column": f"{run['sync']} {run['sampling']}"}
        for run in result["runs"]
    ]
    columns = [f"{sync} {sampling}" for sync, sampling in product(SYNCS, SAMPLINGS)]
    shown = pivot(runs, "row", "column", cell, "link, who drafts", columns)
    told = (
        "{totals[same]} of {answers} answers ({figures[tokens]} tokens) are the target's own to the last id, "
        "{totals[tie]} part at a numerical tie; {prompts} prompts, every one greedy and sampled over every link, "
        "{at_once} conversations at once. {figures[offline_tokens]} tokens were written offline or while an answer was "
        "late, {figures[retracted]} of them withdrawn; {figures[resumes]} sessions were resumed."
    ).format(**result)
    return f"Answers equal to target-only decoding, by link, who drafts, records and sampling\n\n{shown}\n\n{told}"
