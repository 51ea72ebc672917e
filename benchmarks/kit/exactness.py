"""The check that no speed or acceptance figure goes without: the text with speculation is the text without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moa.errors import MoaError
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings, gumbel

TIE = 1e-3
"""Scores this close are equal to float32 sums of another order; anything further apart is a fault of ours."""

Logits = Callable[[list[int]], Any]
"""The target's after these tokens."""


def margin(
    logits: Logits, prompt: Sequence[int], wanted: Sequence[int], got: Sequence[int], sampling: SamplingSettings
) -> tuple[int, float]:
    """Where two texts part, and how far the two tokens' scores are apart there; infinitely when one is only longer."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    if at is None:
        return min(len(wanted), len(got)), float("inf")
    context = [*prompt, *wanted[:at]]
    scores = np.asarray(logits(context), np.float64)
    if not sampling.greedy:
        scores = scores / sampling.temperature + gumbel(sampling.seed, len(context), len(scores))
    return at, abs(float(scores[wanted[at]] - scores[got[at]]))


def count_ties(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    speculated: Sequence[Sequence[int]],
    sampling: SamplingSettings,
) -> int:
    """How many texts part at a numerical tie. Raises where one parts for any other reason."""

    def logits(context: list[int]) -> Any:
        slot = target.pool.acquire()
        try:
            return target.forward([Row.chain(slot, context)]).logits(0, [len(context) - 1])[0].cpu().numpy()
        finally:
            target.pool.release(slot)

    ties = 0
    for number, (prompt, wanted, got) in enumerate(zip(prompts, plain, speculated, strict=True)):
        if list(wanted) != list(got):
            at, apart = margin(logits, prompt, wanted, got, sampling)
            if not apart < TIE:
                raise MoaError(
                    f"speculation changed the text of prompt {number} at token {at} (margin {apart:.2g}): this is a bug"
                )
            ties += 1
    return ties
