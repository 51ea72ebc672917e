"""Compares every form of a drafter with the float32 one on the same recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from export.agreement import CHAIN, TREE, AcceptedRounds, acceptance, first_guesses, offline, rounds
from export.continuations import Continuation
from export.runner import Runner, TorchRunner
from moa.manifest import Agreement, Calibration


class Reference:
    """Recorded texts of the target, and the float32 drafter's acceptance on them."""

    def __init__(self, traces: Sequence[Continuation], reference: TorchRunner, origin: str) -> None:
        self.traces, self.reference, self.origin = traces, reference, origin

    @property
    def tokens(self) -> int:
        """Tokens of the target's continuations."""
        return sum(len(trace.ids) - trace.prompt for trace in self.traces)

    @cached_property
    def _reference_rounds(self) -> AcceptedRounds:
        return rounds(self.reference, self.traces, TREE)

    @cached_property
    def _reference_guesses(self) -> list[int]:
        return [guess for guess, _ in first_guesses(self.reference, self.traces)]

    def judge(self, runner: Runner) -> Agreement:
        """Compare a form with the float32 drafter."""
        pairs = list(first_guesses(runner, self.traces))
        found = rounds(runner, self.traces, TREE).tokens_per_round
        same = [guess == wanted for (guess, _), wanted in zip(pairs, self._reference_guesses, strict=True)]
        return Agreement(
            prompts=len(self.traces),
            tokens=self.tokens,
            top1=round(float(np.mean([guess == token for guess, token in pairs])), 4),
            top1_same=round(float(np.mean(same)), 4),
            acceptance=round(found, 4),
            acceptance_ratio=round(found / self._reference_rounds.tokens_per_round, 4),
        )

    def calibration(self) -> Calibration:
        """Calibration for the controller and the offline guard."""
        return Calibration(
            prompts=len(self.traces),
            tokens=self.tokens,
            source=self.origin,
            acceptance=acceptance(rounds(self.reference, self.traces, CHAIN), self._reference_rounds),
            offline=offline(self.reference, self.traces, cold=False),
            cold=offline(self.reference, self.traces, cold=True),
        )
