"""Compares ways to continue the same prompts: every prompt in all ways in turn, after checking every text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.drafters.acceptance import acceptance_length
from benchmarks.kit.exactness import count_ties
from benchmarks.kit.paired import times
from benchmarks.kit.progress import Progress, say
from benchmarks.kit.speculator import Generation
from moa.model.target import Target
from moa.sampling import SamplingSettings

Prompts = list[list[int]]
Run = Callable[[list[int]], Generation]

PLAIN = "plain"
"""The way whose texts are the reference, and to which a category's speed is relative."""


@dataclass
class Way:
    """One way to continue a prompt, and how long it took each time."""

    name: str
    says: str
    run: Run
    lengths: list[int] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    """Of every prompt, of every pass."""
    cpu: list[list[float]] = field(default_factory=list)
    """The same in processor time of all threads, which other processes affect less."""
    tau: float | None = None

    def time(self, place: int, prompt: list[int]) -> None:
        """One more pass over a prompt."""
        began, before = time.perf_counter(), time.process_time()
        self.run(prompt)
        self.cpu[place].append(time.process_time() - before)
        self.seconds[place].append(time.perf_counter() - began)


def race(
    ways: Sequence[Way], target: Target, prompts: Prompts, categories: Sequence[str], *, repeats: int, t: float = 0.0
) -> dict[str, Any]:
    """Run every way once to warm up and to check its texts, then every prompt in all ways in turn, `repeats` times:
    what slows the machine for a while slows all ways."""
    sampling = SamplingSettings(temperature=t)
    plainly = next(way for way in ways if way.name == PLAIN)
    truth = [plainly.run(prompt).ids for prompt in prompts]
    for way in ways:
        generations = [way.run(prompt) for prompt in prompts]
        ties = count_ties(target, prompts, truth, [g.ids for g in generations], sampling)
        way.lengths = [len(g.ids) for g in generations]
        way.seconds, way.cpu = [[] for _ in prompts], [[] for _ in prompts]
        if any(g.won for g in generations) and way is not plainly:
            way.tau = acceptance_length(generations)["tau"]
        say(f"{way.name}: texts equal plain decoding" + (f", {ties} up to a tie" if ties else ""))
    progress = Progress(repeats * len(prompts), f"prompts at T = {t:g}")
    for number in range(repeats):
        for place, prompt in enumerate(prompts):
            first = (number + place) % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                way.time(place, prompt)
            progress.step()
    return {"temperature": t, "ways": [_figures(way, plainly, categories) for way in ways]}


def _figures(way: Way, plainly: Way, categories: Sequence[str]) -> dict[str, Any]:
    rates = [sum(way.lengths) / sum(taken) for taken in zip(*way.seconds, strict=True)]
    gains = {
        category: {
            key: [(found := times(vars(way), vars(plainly), categories, {category}, key=key)).value, found.error]
            for key in ("seconds", "cpu")
        }
        for category in dict.fromkeys(categories)
    }
    return {
        "name": way.name,
        "says": way.says,
        "runs": rates,
        "median": statistics.median(rates),
        "tau": way.tau,
        "times_plain": gains,
    }
