"""The time of a step on this machine."""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter

import numpy as np

from export.body import BodySpec
from export.parity import random_steps
from export.runner import OrtRunner
from moa.manifest import StepTime

PAST, RECORDS = 256, 256
"""Cache rows and records in a timed step: a chat of some length."""
STEPS = (1, 8)
"""Tokens of a chain's step, and of a tree's."""


def step_times(
    model: Path, spec: BodySpec, vocabulary: int, *, threads: tuple[int, ...] = (1, 2), seconds: float = 0.5
) -> tuple[StepTime, ...]:
    """Median step times, each measured for about `seconds`."""
    times = []
    for count in threads:
        runner = OrtRunner(model, spec, threads=count)
        for width in STEPS:
            (step,) = random_steps(spec, vocabulary, sizes=((width, width, PAST, RECORDS),))
            feeds = {name: np.ascontiguousarray(value) for name, value in step.feeds(spec).items()}
            for _ in range(3):
                runner.session.run(None, feeds)
            taken: list[float] = []
            while sum(taken) < seconds or len(taken) < 5:
                start = perf_counter()
                runner.session.run(None, feeds)
                taken.append(perf_counter() - start)
            times.append(StepTime(tokens=width, threads=count, ms=round(1000 * statistics.median(taken), 4)))
    return tuple(times)
