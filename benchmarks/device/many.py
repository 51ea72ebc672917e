"""Many conversations at once over one device and one connection: exactness, fairness, and memory of each."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.kit.figures import listing
from benchmarks.kit.lab import Asking, open_lab
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.tools.compare import ask

Options = Asking
MANY = 16


async def measure(options: Options) -> dict[str, Any]:
    """Conversations that begin together, of which each gets one answer."""
    settings: dict[str, Any] = {"max_new_tokens": options.tokens, "ignore_eos": True, "offline_after": 60.0}
    runs = []
    with open_lab(options, slots=MANY) as lab:
        lab.prompts = [lab.prompts[i % len(lab.prompts)] for i in range(MANY)]
        truth = [answer.ids for answer in await lab.answers(draft="single", sync="off", **settings)]
        for draft in ("device", "server"):
            async with lab.client(draft=draft, **settings) as client:
                began = perf_counter()
                answers = await asyncio.gather(*(ask(client, ids) for ids in lab.prompts))
                seconds = perf_counter() - began
            speeds = [len(answer.ids) / answer.stats["seconds"] for answer in answers]
            runs.append(
                {
                    "draft": draft,
                    "same": sum(answer.ids == ids for answer, ids in zip(answers, truth, strict=True)),
                    "asked": MANY,
                    "tokens_per_second": sum(len(answer.ids) for answer in answers) / seconds,
                    "slowest": min(speeds),
                    "fastest": max(speeds),
                    "slowest_of_median": min(speeds) / median(speeds),
                }
            )
    return {
        "tokens": options.tokens,
        "bytes_each": await _memory(lab.device, options.tokens),
        "faults": sum(run["asked"] - run["same"] for run in runs),
        "runs": runs,
    }


async def _memory(device: Device, tokens: int) -> int:
    """Memory of one more conversation on the device, for an offline answer of so many tokens."""
    async with EdgeClient(device=device, offline=True, max_new_tokens=tokens, max_offline_tokens=0) as client:
        kept = [client.conversation()]  # the first loads what all share
        await ask(kept[0], list(range(8, 40)))
        tracemalloc.start()
        for start in range(4):
            kept.append(client.conversation())
            await ask(kept[-1], list(range(8 + start, 40 + start)))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return taken // 4


def tables(result: Mapping[str, Any]) -> str:
    """A row by who drafts."""
    shown = listing(
        result["runs"],
        {
            "drafted by": "{draft}",
            "texts the target's own": "{same} of {asked}",
            "tokens/s in all": "{tokens_per_second:.0f}",
            "slowest / fastest": "{slowest:.1f} / {fastest:.1f}",
            "slowest of the median": "{slowest_of_median:.0%}",
        },
    )
    return f"{shown}\n\nA conversation takes {result['bytes_each'] / 1e6:.2f} MB of the device's memory."
