"""A part of the vocabulary to compare over, drawn anew for every batch: with a small drafter on a
processor, the head is most of a step.

The part is all tokens ("words") of the batch and others at random, the more likely the more often
they occur in the data. Each stands for those that were left out: its logit is raised by the logarithm of one
over its chance, so that both distributions keep their sums in expectation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.model.borrowed import SharedWeights
from moa.training.data import Batch


@dataclass(frozen=True)
class SampledHead:
    """Draws each word by its chance, and those of the batch."""

    own: SharedWeights
    """The drafter's embedding and head: the target's, or its own."""
    their: SharedWeights
    """The target's."""
    seed: int
    chances: NDArray[np.float64]
    """Of each word, to be drawn for a batch without it; words that only one head has are none."""

    def __call__(self, batch: Batch, step: int) -> tuple[SharedWeights, SharedWeights]:
        """The drafter's and the target's weights with those rows of their heads that are for the
        words (tokens of the vocabulary) drawn for this batch and step: those in the batch, and
        others by their chances. The bias makes up for the words that were left out."""
        chances = self.chances.copy()
        chances[np.unique(batch.ids)] = 1.0
        random = np.random.default_rng([self.seed, step, int(batch.rows[0])])
        words = np.flatnonzero(random.random(len(chances)) < chances)
        rows = torch.from_numpy(words).to(self.their.head.device)
        bias = -torch.from_numpy(np.log(chances[words])).float().to(rows.device)
        their = replace(self.their, head=self.their.head[rows], bias=bias)
        if _is_one(self.own.head, self.their.head):
            return replace(self.own, head=their.head, bias=bias), their
        return replace(self.own, head=self.own.head[rows], bias=bias), their


def _is_one(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are views of one weight: each may hold a tensor of its own over it."""
    return mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape


def chances(weights: NDArray[np.floating], words: int) -> NDArray[np.float64]:
    """The chance with which each word (token of the vocabulary) is drawn, so that `words` of them
    are on average: in proportion to its weight, but 1 at most."""
    if words >= len(weights):
        return np.ones(len(weights))  # all of them
    heaviest_first = np.sort(weights)[::-1]
    rest = np.cumsum(heaviest_first[::-1])[::-1]  # the weight of this word and all lighter ones
    # If the n heaviest words are certain, `words - n` are left for the others in proportion to their
    # weights. Enough are certain at the first n at which the next word's chance is below 1.
    left = words - np.arange(len(weights))
    certain = int(np.argmax(heaviest_first * left < rest))
    return np.minimum(1.0, weights * left[certain] / rest[certain])
