"""Compares ways to continue the same prompts: all in turn, prompt by prompt, after checking every text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.drafters.acceptance import acceptance_length
from benchmarks.kit.exactness import count_ties
from benchmarks.kit.progress import say
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.speculate import Generation

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
    """Seconds of every pass, of every prompt."""
    tau: float | None = None

    def time(self, prompts: Prompts) -> float:
        """One pass over the prompts; its tokens a second."""
        taken = []
        for prompt in prompts:
            began = time.perf_counter()
            self.run(prompt)
            taken.append(time.perf_counter() - began)
        self.seconds.append(taken)
        return sum(self.lengths) / sum(taken)


def race(
    ways: Sequence[Way], target: Target, prompts: Prompts, categories: Sequence[str], *, repeats: int, t: float = 0.0
) -> dict[str, Any]:
    """Run every way once to warm up and to check its texts, then all of them in turn, `repeats` times."""
    sampling = SamplingSettings(temperature=t)
    plainly = next(way for way in ways if way.name == PLAIN)
    truth = [plainly.run(prompt).ids for prompt in prompts]
    for way in ways:
        generations = [way.run(prompt) for prompt in prompts]
        ties = count_ties(target, prompts, truth, [g.ids for g in generations], sampling)
        way.lengths = [len(g.ids) for g in generations]
        if any(g.won for g in generations) and way is not plainly:
            way.tau = acceptance_length(generations)["tau"]
        say(f"{way.name}: texts equal plain decoding" + (f", {ties} up to a tie" if ties else ""))
    for number in range(repeats):
        rates = ", ".join(f"{way.name} {way.time(prompts):.1f}" for way in ways)
        say(f"round {number + 1} of {repeats}: {rates}")
    return {"temperature": t, "ways": [_figures(way, plainly, categories) for way in ways]}


def _figures(way: Way, plainly: Way, categories: Sequence[str]) -> dict[str, Any]:
    rates = [sum(way.lengths) / sum(taken) for taken in way.seconds]
    gains = {}
    for category in dict.fromkeys(categories):
        of_it = [n for n, name in enumerate(categories) if name == category]
        passes = zip(plainly.seconds, way.seconds, strict=True)
        gains[category] = statistics.median(sum(a[n] for n in of_it) / sum(b[n] for n in of_it) for a, b in passes)
    return {
        "name": way.name,
        "says": way.says,
        "runs": rates,
        "median": statistics.median(rates),
        "tau": way.tau,
        "times_plain": gains,
    }
