"""A part of the vocabulary stands for the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moa.model.borrowed import SharedWeights
from moa.training.data import Batch
from moa.training.sampled import SampledHead, chances


@pytest.mark.parametrize("words", [1, 7, 64, 255, 256, 300])
def test_chances_add_up_to_the_number_asked_for(words: int) -> None:
    weights = 1000 / np.arange(1.0, 257.0)
    found = chances(weights, words)
    assert found.max() <= 1
    assert found.sum() == pytest.approx(min(words, 256))
    assert (np.diff(found) <= 0).all()


def test_words_of_the_batch_are_certain_and_the_sums_of_both_distributions_are_kept() -> None:
    luck = np.random.default_rng(0)
    whole = SharedWeights(torch.empty(0), torch.from_numpy(luck.normal(size=(400, 8))).float())
    head = SampledHead(whole, whole, 0, chances(np.arange(400.0, 0, -1), 60))
    ids = np.array([[3, 399]])
    batch = Batch(ids, ids, ids, ids > 0, np.array([0]))
    hidden = torch.ones(8)
    sums = []
    for step in range(600):
        part, theirs = head(batch, step)
        assert part.head is theirs.head
        assert {tuple(row) for row in whole.head[[3, 399]].tolist()} <= {
            tuple(row) for row in part.head.tolist()
        }
        sums.append(float((part.head @ hidden + part.bias).exp().sum()))
    assert np.mean(sums) == pytest.approx(float((whole.head @ hidden).exp().sum()), rel=0.1)
