"""Comparisons prompt by prompt: how many times as fast, with a standard error over the prompts.

Speeds are geometric means over prompts, so the ratio of two speeds is the mean ratio on the same
prompts, and no prompt counts more because it is slow. Of several passes over a prompt the median
counts. Kinds of text differ far more than prompts of a kind, and how many there are of each is
fixed: so errors are those within exercises and natural text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any

from benchmarks.kit.figures import Result

EXERCISES = "exercises"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its standard error; of a single prompt there is none."""

    value: float
    error: float = math.nan

    def __format__(self, form: str) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:{form}}"
        return f"{self.value:{form}}{error}"

    @property
    def up_to(self) -> float:
        """The value and one standard error."""
        return self.value if math.isnan(self.error) else self.value + self.error


def speed(run: Result, kinds: Sequence[str], only: Collection[str] = ()) -> Estimate:
    """Tokens a second of a run: `seconds` and `tokens` by prompt. `only` leaves other kinds of
    prompts out."""
    taken = [
        math.log(tokens / median(passes))
        for tokens, passes in zip(run["tokens"], run["seconds"], strict=True)
    ]
    return _mean(taken, kinds, only)


def times(
    run: Result,
    other: Result,
    kinds: Sequence[str],
    only: Collection[str] = (),
    *,
    key: str = "seconds",
) -> Estimate:
    """How many times as fast as another run, on the prompts that both had; pass by pass."""
    pairs: Any = zip(run[key], other[key], strict=False)
    gains = [
        median(math.log(b / a) for a, b in zip(ours, theirs, strict=False))
        for ours, theirs in pairs
    ]
    return _mean(gains, kinds, only)


def _mean(logs: Sequence[float], kinds: Sequence[str], only: Collection[str]) -> Estimate:
    """Of logarithms by prompt; back on the scale of what they are of."""
    found = [
        (kind == EXERCISES, value)
        for kind, value in zip(kinds, logs, strict=False)
        if not only or kind in only
    ]
    if not found:
        return Estimate(math.nan)
    value = math.exp(fmean(value for _, value in found))
    groups = [[value for group, value in found if group is which] for which in (True, False)]
    groups = [group for group in groups if group]
    if min(map(len, groups)) < 2:
        groups = [[value for _, value in found]]
    if len(found) < 2:
        return Estimate(value)
    return Estimate(
        value, value * math.sqrt(sum(len(group) * variance(group) for group in groups)) / len(found)
    )
