"""Cuts the link at random bytes again and again; every text must be the target's own, without lost or repeated
tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import Progress
from benchmarks.kit.truth import Truth, read
from edge_client.tools.emulated_network import LinkProxy
from moa.sampling import SamplingSettings

_SOON: dict[str, Any] = {"offline_after": 0.15, "reconnect_seconds": 0.05, "settle_seconds": 60.0}
_DRAFTS = ("device", "server", "auto")
_AT_ONCE = 8
_COUNTED = {"tokens": "tokens", "offline_tokens": "offline_tokens", "retracted_tokens": "retracted"}


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """How often, and where."""

    cuts: int = 200
    seed: int = 0
    most_bytes: int = 1500
    """Each connection is cut within this many bytes."""


async def measure(options: Options) -> dict[str, Any]:
    """Answer prompts until there were this many cuts; greedy and sampled, drafted by device, server or both."""
    figures: Counter[str] = Counter(different=0, ties=0, not_verified=0)
    numbers, progress = count(), Progress(options.cuts, "cuts")
    with open_lab(options) as lab:
        truth = Truth(options.target, eos_ids=lab.device.codec.eos_ids, tokens=options.tokens)

        async def keep_asking() -> None:
            while figures["cuts"] < options.cuts:
                await ask(next(numbers))

        async def ask(number: int) -> None:
            """One conversation over its own link, so that a cut affects only this one."""
            ids, rng = lab.prompts[number % len(lab.prompts)], random.Random(f"{options.seed} {number}")
            sampling = (
                SamplingSettings(temperature=0.8, top_p=0.95, seed=number) if number % 4 > 1 else SamplingSettings()
            )
            settings = {"draft": _DRAFTS[number % len(_DRAFTS)], "max_new_tokens": options.tokens, **_SOON}
            async with (
                lab.link("loopback", seed=number) as link,
                lab.client(link, online=False, **settings, **dataclasses.asdict(sampling)) as client,
            ):
                cutting = asyncio.create_task(_keep_cutting(link, rng, options.most_bytes))
                said = await read(client, ids)
                cutting.cancel()
                await asyncio.gather(cutting, return_exceptions=True)
                assert client.link is not None
                cuts = max(0, client.link.connections - 1)
            assert said.done is not None
            outcome = truth.judge(ids, sampling, said.tokens)
            figures.update(
                cuts=cuts,
                answers=1,
                sampled=not sampling.greedy,
                ties=outcome == "tie",
                different=outcome == "different",
                not_verified=not all(said.verified),
                **{name: said.done.stats[stat] for name, stat in _COUNTED.items()},
            )
            for _ in range(cuts):
                progress.step(f"{figures['answers']} answers, {figures['different']} differ")

        await asyncio.gather(*(keep_asking() for _ in range(_AT_ONCE)))
    return {**figures, "faults": figures["different"] + figures["not_verified"]}


async def _keep_cutting(link: LinkProxy, rng: random.Random, most: int) -> None:
    """Cut nearly every connection somewhere in what it carries."""
    seen = 0
    while True:
        if link.connections > seen:
            seen = link.connections
            if rng.random() < 0.85:
                link.cut_after(rng.randrange(100, most), rng.choice(["up", "down"]))
        await asyncio.sleep(0.002)


def tables(result: Mapping[str, Any]) -> str:
    """All in a sentence."""
    return (
        "{cuts} cuts of the link at random bytes in {answers} answers ({tokens} tokens; {sampled} of the answers "
        "sampled; drafted by device, server or both in turn), policy `rewind`: {different} texts differ from the "
        "target's own, {ties} part at a numerical tie, {not_verified} are not wholly verified; no token was told twice "
        "or left out. {offline_tokens} tokens were written offline, {retracted_tokens} of them withdrawn."
    ).format(**result)
