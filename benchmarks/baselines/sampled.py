"""Losses over a part of the vocabulary, drawn anew for every batch: with a small drafter on a processor, the head is
most of a step.

The part is all words of the batch, and others at random that each stand for as many as were left out: their logits
are raised by the logarithm of that number, so that both distributions keep their sums in expectation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moa.model.shared import SharedWeights
from moa.training.data import Batch
from moa.training.loop import Loss
from moa.training.losses import Compared, compare

_ALIGNED = 32
"""Columns that carry the raised logits, of which only the first is not zero."""


class SampledHead:
    """An `Objective` that compares through such a part of the head."""

    def __init__(self, task: Any, words: int) -> None:
        self.task, self.words, self.module = task, words, task.module
        task._compare = self.compare
        self._head: SharedWeights | None = None

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The task's loss over this batch's words."""
        whole: Tensor = self.task.teacher.shared.head
        certain = np.unique(batch.ids)
        others = np.setdiff1d(np.arange(len(whole)), certain)
        luck = np.random.default_rng([self.task.seed, step, int(batch.rows[0])])
        drawn = luck.choice(others, min(self.words, len(others)), replace=False)
        head = F.pad(whole[torch.from_numpy(np.concatenate([certain, drawn]))], (0, _ALIGNED))
        head[len(certain) :, -_ALIGNED] = math.log(len(others) / len(drawn))
        self._head = SharedWeights(head, head, logit_softcap=self.task.teacher.shared.logit_softcap)
        found: Loss = self.task.loss(batch, step, progress)
        return found

    def compare(self, mine: Tensor, theirs: Tensor, *, overlaps: bool = False) -> Compared:
        """As the task's own, without losses on features."""
        assert self._head is not None
        mine, theirs = (F.pad(F.pad(x, (0, 1), value=1.0), (0, _ALIGNED - 1)) for x in (mine, theirs))
        return compare(mine, theirs, self._head, self._head, self.task.settings.loss, overlaps=overlaps)
