"""The share of the float32 drafter's acceptance that a form keeps, with its standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from export.agreement import TREE, Replay
from export.continuations import Continuation
from export.runner import Runner

_AT_ONCE = 8
"""Tokens whose first guesses come from one step: as many as a static form takes."""


@dataclass(frozen=True)
class Measured:
    """One text, drafted along."""

    accepted: list[int]
    """Accepted drafts of every round, with the calibration's tree."""
    guesses: list[int]
    """First guess after each token of the answer, with the records up to eight tokens before."""


def measure(runner: Runner, trace: Continuation) -> Measured:
    """Draft along a text."""
    replay, end = Replay(runner, trace), len(trace.ids) - 1
    guesses: list[int] = []
    for at in range(trace.prompt, end, _AT_ONCE):
        guesses += replay.guesses(at, min(at + _AT_ONCE, end), at).tolist()
    return Measured(replay.rounds(TREE), guesses)


def share(found: Sequence[Measured], reference: Sequence[Measured]) -> dict[str, Any]:
    """Acceptance length (tokens a round, the target's own included) beside the reference's on the same texts.

    The standard error is the jackknife's over prompts: both are measured on the same ones, so most of their spread
    cancels in the ratio.
    """
    pairs = list(zip(found, reference, strict=True))
    tokens = np.array([[sum(side.accepted) + len(side.accepted) for side in pair] for pair in pairs], np.float64)
    rounds = np.array([[len(side.accepted) for side in pair] for pair in pairs], np.float64)
    lengths = tokens.sum(0) / rounds.sum(0)
    without = (tokens.sum(0) - tokens) / np.maximum(rounds.sum(0) - rounds, 1)
    ratios = without[:, 0] / without[:, 1]
    count = len(pairs)
    error = float(np.sqrt((count - 1) / count * ((ratios - ratios.mean()) ** 2).sum()))
    same = [a == b for one, other in pairs for a, b in zip(one.guesses, other.guesses, strict=True)]
    return {
        "prompts": count,
        "rounds": int(rounds[:, 0].sum()),
        "acceptance": round(float(lengths[0]), 4),
        "fp32": round(float(lengths[1]), 4),
        "ratio": round(float(lengths[0] / lengths[1]), 4),
        "se": round(error, 4),
        "positions": len(same),
        "same_guess": round(float(np.mean(same)), 4),
    }
