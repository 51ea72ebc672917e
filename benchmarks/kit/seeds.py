"""Runs of several seeds of a drafter as one: means, their errors, and how drafters of equal training compare."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.kit.figures import Result

YARDSTICKS = ("eagle2", "independent")


def method(run: Result) -> str:
    """A drafter's name without the number of its seed."""
    return re.sub(r"-\d+$", "", str(run["drafter"]))


def over_seeds(runs: Sequence[Result]) -> dict[str, Any]:
    """The mean of a drafter's seeds, by kind and over kinds. Its error is that of the prompts, or with several seeds
    the one between them where that is larger."""
    means = [run["mean"]["tau"] for run in runs]
    between = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return {
        "drafter": method(runs[0]),
        "steps": runs[0]["steps"],
        "seeds": len(runs),
        "mean": statistics.fmean(means),
        "se": max(between, statistics.fmean(run["mean"]["se"] for run in runs)),
        "kinds": {
            kind: (
                statistics.fmean(run["categories"][kind]["tau"] for run in runs),
                statistics.fmean(run["categories"][kind]["se"] for run in runs),
            )
            for kind in runs[0]["categories"]
        },
    }


def methods(result: Result, temperature: float) -> list[dict[str, Any]]:
    """Every drafter at a temperature, its seeds as one, and how it stands to the yardsticks of as many steps."""
    runs = [run for run in result["runs"] if run["temperature"] == temperature]
    found = [over_seeds([run for run in runs if method(run) == name]) for name in dict.fromkeys(map(method, runs))]
    by_name = {one["drafter"]: one for one in found}
    for one in found:
        for name in YARDSTICKS:
            other = by_name.get(name)
            same = other is not None and one["steps"] is not None and one["steps"] == other["steps"]
            one[f"vs {name}"] = one["mean"] / other["mean"] if other and same else None
    return found
