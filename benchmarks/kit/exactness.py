"""Checks that the text with speculation equals the text without. All speed and acceptance figures
need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moa.errors import MoaError
from moa.sampling import SamplingSettings, gumbel
from moa.target.torch_target import Row, Target

TIE = 1e-3
"""Scores this close can differ in float32 by the order of additions; a larger difference is a bug."""

Logits = Callable[[list[int]], Any]
"""The target's after these tokens."""


def margin(
    logits: Logits,
    prompt: Sequence[int],
    wanted: Sequence[int],
    got: Sequence[int],
    sampling: SamplingSettings,
) -> tuple[int, float]:
    """The first difference of two texts, and the gap of the two tokens' scores there; infinite if
    one text is only longer."""
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
    """Number of texts that differ at a numerical tie. Raises if one differs for another reason."""

    def logits(context: list[int]) -> Any:
        slot = target.cache.acquire()
        try:
            return (
                target.forward([Row.chain(slot, context)])
                .logits(0, [len(context) - 1])[0]
                .cpu()
                .numpy()
            )
        finally:
            target.cache.release(slot)

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
