"""A part of the vocabulary to compare over, drawn anew for every batch: with a small drafter on a
processor, the head is most of a step.

The part is all words of the batch and others at random, the more likely the more often they occur
in the data. Each stands for those that were left out: its logit is raised by the logarithm of one
over its chance, so that both distributions keep their sums in expectation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from moa.model.borrowed import SharedWeights
from moa.training.data import Batch


@dataclass(frozen=True)
class SampledHead:
    """Draws each word by its chance, and those of the batch."""

    whole: SharedWeights
    seed: int
    chances: NDArray[np.float64]

    def __call__(self, batch: Batch, step: int) -> SharedWeights:
        likely = self.chances.copy()
        likely[np.unique(batch.ids)] = 1.0
        luck = np.random.default_rng([self.seed, step, int(batch.rows[0])])
        drawn = np.flatnonzero(luck.random(len(likely)) < likely)
        chosen = torch.from_numpy(drawn).to(self.whole.head.device)
        bias = -torch.from_numpy(np.log(likely[drawn])).float().to(chosen.device)
        return replace(self.whole, head=self.whole.head[chosen], bias=bias)


def chances(weights: NDArray[np.floating], words: int) -> NDArray[np.float64]:
    """The chance of each word, in proportion to its weight but 1 at most, so that `words` are drawn
    on average."""
    if words >= len(weights):
        return np.ones(len(weights))
    order = np.sort(weights)[::-1]
    rest = np.cumsum(order[::-1])[::-1]
    certain = int(np.argmax(order * (words - np.arange(len(order))) < rest))
    return np.minimum(1.0, weights * (words - certain) / rest[certain])
