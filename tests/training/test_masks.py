from __future__ import annotations

import numpy as np
import pytest

from moa.errors import ConfigError
from moa.training.data import Batch
from moa.training.masks import AnchorRule, Spacing, borrowed_mask, record_mask, token_mask

RULES = {
    "variable": AnchorRule(),
    "paper": AnchorRule(strict=False),
    "mixed": AnchorRule((Spacing(2, 5, 0.5), Spacing(9, 12, 0.3))),
    "prompt only": AnchorRule(()),
    "some cold": AnchorRule((Spacing(2, 5, 0.5),), cold=0.3),
}


every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@every_rule
def test_masks_are_what_their_definition_says(batch: Batch, rule: AnchorRule) -> None:
    latest = rule.latest(batch, 0, 0)
    seen = record_mask(batch, latest, strict=rule.strict)
    causal = token_mask(batch, None)
    stairs = token_mask(batch, latest)
    borrowed = borrowed_mask(batch, seen)
    count, length = batch.ids.shape
    for b, i, j in np.ndindex(count, length, length):
        same = batch.segments[b, i] == batch.segments[b, j]
        visible = same and j <= latest[b, i] and (j < i or not rule.strict)
        assert seen[b, i, j] == visible
        assert causal[b, i, j] == (same and j <= i)
        assert stairs[b, i, j] == (same and j <= i and (j > latest[b, i] or j == i))
        assert borrowed[b, i, j] == visible
        assert borrowed[b, i, length + j] == (same and j <= i and not visible)


@every_rule
def test_an_anchor_is_latest_from_itself_on_and_stays_in_its_document(
    batch: Batch, rule: AnchorRule
) -> None:
    latest = rule.latest(batch, 0, 0)
    for b, row in enumerate(latest):
        for i, anchor in enumerate(row):
            if anchor < 0:
                continue
            assert anchor <= i
            assert batch.segments[b, anchor] == batch.segments[b, i]
            assert row[anchor] == anchor
    if not rule.cold:
        index = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
        assert (latest[~batch.wanted] == index[~batch.wanted]).all(), (
            "every token of a prompt is one"
        )
    if not rule.spacings:
        assert not batch.wanted[np.nonzero(latest >= 0)[0], latest[latest >= 0]].any(), (
            "and no other"
        )


def test_gaps_between_anchors_are_of_the_spacing() -> None:
    length = 200
    batch = Batch(
        *(np.ones((6, length), np.int64),) * 2,
        np.tile(np.arange(length), (6, 1)),
        np.ones((6, length), bool),
        np.arange(6),
    )
    latest = AnchorRule((Spacing(6, 14, 1.0),)).latest(batch, 0, 0)
    for row in latest:
        anchors = sorted({int(a) for a in row if a >= 0})
        gaps = set(np.diff(anchors).tolist())
        assert len(gaps) == 1
        assert 6 <= gaps.pop() <= 14


def test_cold_documents_see_no_activation_at_all() -> None:
    documents = 400
    length = 8
    segments = np.repeat(np.arange(1, documents + 1), length)[None]
    positions = np.tile(np.arange(length), documents)[None]
    wanted = positions >= 3
    batch = Batch(np.ones_like(segments), segments, positions, wanted, np.zeros(1, np.int64))
    latest = AnchorRule((Spacing(2, 5, 0.5),), cold=0.3).latest(batch, 0, 0)
    anchored = (latest >= 0).reshape(documents, length)
    cold = ~anchored.any(1)
    assert anchored[~cold, 0].all()  # the others have their prompt's at least
    assert 0.2 < cold.mean() < 0.4


def test_anchors_are_a_function_of_seed_step_and_row(rows) -> None:
    rule = RULES["mixed"]
    whole = rows.batch(0, 0, 8)
    half = rows.rows(whole.rows[4:])
    assert (rule.latest(whole, 1, 2)[4:] == rule.latest(half, 1, 2)).all()
    assert not (rule.latest(whole, 1, 2) == rule.latest(whole, 1, 3)).all()


@pytest.mark.parametrize(
    ("spacing", "cold", "said"),
    [
        ((0, 4, 1.0), 0.0, "spacing"),
        ((5, 4, 1.0), 0.0, "spacing"),
        ((4, 5, 1.5), 0.0, "spacing"),
        ((4, 5, -0.1), 0.0, "spacing"),
        ((2, 5, 0.5), -0.1, "cold"),
        ((2, 5, 0.5), 1.1, "cold"),
        ((2, 5, 0.5), 0.6, "cold"),
    ],
)
def test_anchors_that_cannot_be(spacing: tuple[int, int, float], cold: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AnchorRule((Spacing(*spacing),), cold=cold)
