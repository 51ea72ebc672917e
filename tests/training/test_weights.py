from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moa.errors import ConfigError
from moa.model.shared import SharedWeights
from moa.training.data import Batch
from moa.training.distill import DistillSettings
from moa.training.losses import compare
from moa.training.masks import AnchorRule, Spacing
from moa.training.weights import lag_weights, prefix_weights
from tests.training.test_distill import task


def row(*lengths: int, prompt: int = 0) -> Batch:
    """Documents of these lengths side by side; the first one has a prompt."""
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    wanted = np.ones_like(segments, dtype=bool)
    wanted[:, :prompt] = False
    return Batch(np.zeros_like(segments), segments, positions, wanted, np.zeros(1, np.int64))


def counted_of(batch: Batch) -> torch.Tensor:
    counted = np.zeros_like(batch.wanted)
    counted[:, :-1] = batch.wanted[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1])
    return torch.from_numpy(counted)


def test_a_position_counts_by_the_draft_before_it_as_computed_by_hand() -> None:
    """Six tokens of text: token 2's activation arrives, so the drafts at 0..2 begin from nothing, those at 3.. anew."""
    batch = row(6)
    counted = counted_of(batch)
    newest = torch.tensor([[-1, -1, -1, 2, 2, 2]])
    overlap = torch.tensor([0.5, 0.4, 0.9, 0.8, 0.3])
    # 1, 0.5 and 0.5 * 0.4 since the start; 1 and 0.8 since token 2. The last token has no loss.
    chances = torch.tensor([1.0, 0.5, 0.2, 1.0, 0.8, 0.0])
    found = prefix_weights(overlap, counted, newest, batch)
    torch.testing.assert_close(found[0], chances * 5 / 3.5)
    assert not prefix_weights(overlap.requires_grad_(), counted, newest, batch).requires_grad


def test_each_document_keeps_its_share_and_what_nobody_verifies_counts_alike() -> None:
    """A document with its prompt's activations alone, one with a late activation, one without any."""
    batch = row(5, 4, 4, prompt=2)
    counted = counted_of(batch)
    newest = torch.tensor([[-1, 0, 1, 1, 1, 4, 5, 5, 5, 8, 8, 8, 8]])
    overlap = torch.tensor([0.3, 0.3, 0.3, 0.5, 0.5, 0.5, 0.2, 0.2, 0.2])
    found = prefix_weights(overlap, counted, newest, batch)[0]
    assert found[:5].tolist() == [0, 1, 1, 1, 0]
    torch.testing.assert_close(found[5:9], torch.tensor([1.0, 1.0, 0.5, 0.0]) * 3 / 2.5)
    assert found[9:].tolist() == [1, 1, 1, 0]


def test_a_rejected_draft_ends_what_counts_without_a_division_by_zero() -> None:
    batch = row(5)
    newest = torch.tensor([[0, 0, 0, 0, 0]])  # the activation of its own, as in the paper's loose anchors
    found = prefix_weights(torch.tensor([1.0, 0.0, 0.9, 0.9]), counted_of(batch), newest, batch)
    torch.testing.assert_close(found[0], torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0]), atol=1e-6, rtol=0)


def test_lag_weights_fall_with_every_token_ahead() -> None:
    assert lag_weights(torch.tensor([[-1, 0, 0, 0]]), 0.5).tolist() == [[1.0, 1.0, 0.5, 0.25]]


def test_overlap_is_the_probability_that_a_sampled_draft_is_accepted() -> None:
    head = SharedWeights(torch.zeros(0), torch.eye(3))
    mine, theirs = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]).log(), torch.tensor([[0.5, 0.4, 0.1]] * 2).log()
    for kind in ("kl", "ce", "tv", "lk"):
        overlap = compare(mine, theirs, head, head, kind, overlaps=True).overlap
        torch.testing.assert_close(overlap, torch.tensor([0.6, 0.3]))
    assert compare(mine, theirs, head, head, "kl").overlap is None


def test_training_with_prefix_weights_keeps_the_scale_and_prefers_sure_beginnings(target: Path, batch: Batch) -> None:
    anchors = AnchorRule((Spacing(4, 6, 1.0),))
    plain = task(target, settings=DistillSettings(anchors=anchors))
    weighed = task(target, settings=DistillSettings(anchors=anchors, prefix_weights=True))
    first, second = plain.loss(batch, 0, 0.0), weighed.loss(batch, 0, 0.0)
    torch.testing.assert_close(first.weight, second.weight)
    assert first.total != second.total
    # At an activation a token every position is the first of its draft.
    for one in (plain, weighed):
        one.settings = replace(one.settings, anchors=AnchorRule((Spacing(1, 1, 1.0),)))
    torch.testing.assert_close(plain.loss(batch, 0, 0.0).total, weighed.loss(batch, 0, 0.0).total)


def test_only_one_kind_of_weights_is_taken() -> None:
    with pytest.raises(ConfigError, match="lag_decay"):
        DistillSettings(prefix_weights=True, lag_decay=0.9)
