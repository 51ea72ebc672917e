"""What is measured on the machine that builds: the time of a step, and golden vectors, a few steps with each variant's
outputs here, so that any machine can compare its own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import numpy as np

from export.body import BodySpec
from export.parity import random_steps
from export.runner import OrtRunner
from moa.bundle import GoldenCase
from moa.manifest import StepTime

PAST, RECORDS = 256, 256
"""Cache rows and records in a timed step: a chat of some length."""
STEPS = (1, 8)
"""Tokens of a chain's step, and of a tree's."""
_GOLDEN_SIZES = {"first": (1, 1, 0, 0), "tree": (6, 6, 9, 5), "prompt": (12, 1, 4, 0)}


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


def golden_cases(spec: BodySpec, vocabulary: int, runners: Mapping[str, OrtRunner]) -> list[GoldenCase]:
    """Run every case with every runner."""
    steps = random_steps(spec, vocabulary, seed=7, sizes=tuple(_GOLDEN_SIZES.values()))
    cases = []
    for name, step in zip(_GOLDEN_SIZES, steps, strict=True):
        inputs = {key: np.ascontiguousarray(value) for key, value in step.feeds(spec).items()}
        outputs = ["top_logp", "top_tokens"]
        expected = {variant: tuple(runner.session.run(outputs, inputs)) for variant, runner in runners.items()}
        cases.append(GoldenCase(name, inputs, expected))
    return cases
