"""Golden vectors: a few steps with each variant's outputs here, so that any machine can compare its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from export.body import BodySpec
from export.parity import random_steps
from export.runner import OrtRunner
from moa.bundle import GoldenCase

_SIZES = {"first": (1, 1, 0, 0), "tree": (6, 6, 9, 5), "prompt": (12, 1, 4, 0)}


def golden_cases(spec: BodySpec, vocabulary: int, runners: Mapping[str, OrtRunner]) -> list[GoldenCase]:
    """Run every case with every runner."""
    steps = random_steps(spec, vocabulary, seed=7, sizes=tuple(_SIZES.values()))
    cases = []
    for name, step in zip(_SIZES, steps, strict=True):
        inputs = {key: np.ascontiguousarray(value) for key, value in step.feeds(spec).items()}
        expected = {}
        for variant, runner in runners.items():
            logp, tokens = runner.session.run(["top_logp", "top_tokens"], inputs)
            expected[variant] = (logp, tokens)
        cases.append(GoldenCase(name, inputs, expected))
    return cases
