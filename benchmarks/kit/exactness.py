"""The check that no speed or acceptance figure goes without: the text with speculation is the text without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moa.errors import MoaError
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings, gumbel

TIE = 1e-3
"""Scores this close are equal to float32 sums of another order; anything further apart is a fault of ours."""


def count_ties(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    speculated: Sequence[Sequence[int]],
    sampling: SamplingSettings,
) -> int:
    """How many texts part at a numerical tie. Raises where one parts for any other reason."""
    ties = 0
    for number, (prompt, wanted, got) in enumerate(zip(prompts, plain, speculated, strict=True)):
        if list(wanted) == list(got):
            continue
        at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
        margin = float("inf") if at is None else _margin(target, [*prompt, *wanted[:at]], wanted[at], got[at], sampling)
        if not margin < TIE:
            raise MoaError(
                f"speculation changed the text of prompt {number} at token {at} (margin {margin:.2g}): this is a bug"
            )
        ties += 1
    return ties


def _margin(target: Target, context: Sequence[int], one: int, other: int, sampling: SamplingSettings) -> float:
    """How far two tokens' scores are apart after `context`."""
    slot = target.pool.acquire()
    try:
        step = target.forward([Row.chain(slot, context)])
        scores = step.logits(0, [len(context) - 1])[0].cpu().numpy().astype(np.float64)
    finally:
        target.pool.release(slot)
    if not sampling.greedy:
        scores = scores / sampling.temperature + gumbel(sampling.seed, len(context), len(scores))
    return abs(float(scores[one] - scores[other]))
