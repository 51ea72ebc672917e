"""The walk over one pass: pairs decide, and what it says is a distribution."""

from __future__ import annotations

import numpy as np
import pytest

from moa.block import Pairs, Said, draft_block
from moa.tree import TreeShape

TOKENS = np.array([[5, 7, 9], [9, 5, 7], [7, 9, 5]])
LOGP = np.log(np.array([[0.5, 0.3, 0.1], [0.4, 0.35, 0.2], [0.6, 0.2, 0.1]], np.float32))
SAID = Said(TOKENS, LOGP, np.ones((3, 1), np.float32))


def pairs(likes: dict[int, int], strength: float = 10.0) -> Pairs:
    """Every token likes one that follows it."""
    before, after = np.zeros((12, 12), np.float16), np.eye(12, dtype=np.float16)
    for token, next_token in likes.items():
        before[token, next_token] = strength
    return Pairs(before, after)


def test_without_pairs_each_place_has_its_own_likeliest_token() -> None:
    tree = draft_block(1, TreeShape.chain(8), SAID, pairs({}))
    assert tree.tokens == [1, 5, 9, 7], "no deeper than the block"
    np.testing.assert_allclose(tree.scores, np.log([1, 0.5, 0.5 * 0.4, 0.5 * 0.4 * 0.6]), rtol=1e-5)


def test_a_token_follows_the_one_that_was_chosen_before_it() -> None:
    tree = draft_block(1, TreeShape(2, 2, 6), SAID, pairs({5: 7, 7: 5}))
    paths = {(tree.tokens[tree.parents[node]], tree.tokens[node]) for node in range(3, len(tree))}
    assert {(5, 7), (7, 5)} <= paths
    best = tree.scores[tree.tokens.index(7, 3)]
    assert best == pytest.approx(np.log(0.5 * (0.2 * np.e**10) / (0.75 + 0.05 + 0.2 * np.e**10)), abs=1e-4)


def test_gates_and_temperature_scale_the_pairs() -> None:
    none = Said(TOKENS, LOGP, np.array([[1.0], [0.0], [1.0]], np.float32))
    assert draft_block(1, TreeShape.chain(2), none, pairs({5: 7})).tokens == [1, 5, 9]
    weak = pairs({5: 7}, strength=0.8)
    assert draft_block(1, TreeShape.chain(2), SAID, weak).tokens == [1, 5, 7]
    assert draft_block(1, TreeShape.chain(2), SAID, weak, 0.5).tokens == [1, 5, 9]


def test_an_unlikely_path_ends() -> None:
    tree = draft_block(1, TreeShape.chain(3, min_score=np.log(0.3)), SAID, pairs({}))
    assert tree.tokens == [1, 5, 9]


def test_a_reduced_vocabulary_has_its_own_rows() -> None:
    whole, kept = pairs({5: 7}), np.array([5, 7, 9])
    small = Pairs(whole.before[kept], whole.after[kept], kept)
    shape = TreeShape(3, 3, 30)
    one, other = draft_block(1, shape, SAID, whole), draft_block(1, shape, SAID, small)
    assert (one.tokens, one.parents, one.scores) == (other.tokens, other.parents, other.scores)
