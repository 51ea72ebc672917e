"""A part of the vocabulary to compare over, drawn anew for every batch: with a small drafter on a processor, the head
is most of a step.

The part is all words of the batch, and others at random that each stand for as many as were left out: their logits
are raised by the logarithm of that number, so that both distributions keep their sums in expectation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from moa.model.borrowed import SharedWeights
from moa.training.data import Batch


@dataclass(frozen=True)
class SampledHead:
    """Draws so many `words` beside the batch's."""

    whole: SharedWeights
    words: int
    seed: int

    def __call__(self, batch: Batch, step: int) -> SharedWeights:
        certain = np.unique(batch.ids)
        others = np.setdiff1d(np.arange(len(self.whole.head)), certain)
        luck = np.random.default_rng([self.seed, step, int(batch.rows[0])])
        drawn = luck.choice(others, min(self.words, len(others)), replace=False)
        chosen = torch.from_numpy(np.concatenate([certain, drawn])).to(self.whole.head.device)
        bias = torch.zeros(len(chosen), device=chosen.device)
        bias[len(certain) :] = math.log(len(others) / len(drawn))
        return replace(self.whole, head=self.whole.head[chosen], bias=bias)
