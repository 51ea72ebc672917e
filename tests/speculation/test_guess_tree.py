"""Trees of guesses: whatever a log does, what is held is what was told below its end."""

from __future__ import annotations

import math
import random

import pytest

from moa.speculation.guess_tree import GuessTree, GuessTreeGrower, neg_log_probs_of
from moa.tree import DraftTree

Paths = dict[tuple[int, ...], int]
"""Guessed continuations of the whole log, and the neg_log_prob of each one's last token."""


def told(rng: random.Random, log: list[int]) -> tuple[int, list[int], list[int], list[int]]:
    """A tree that begins somewhere near the log's end, and follows it now and then."""
    base = max(0, len(log) - rng.randrange(1, 5))
    tokens = [log[base]]
    parents = [-1]
    neg_log_probs = [0]
    places = [base]
    for node in range(1, rng.randrange(2, 9)):
        parent = rng.randrange(node)
        place = places[parent] + 1
        follows = place < len(log) and rng.random() < 0.8
        tokens.append(log[place] if follows else rng.randrange(4))
        parents.append(parent)
        neg_log_probs.append(rng.randrange(20))
        places.append(place)
    return base, tokens, parents, neg_log_probs


def remember(
    paths: Paths, log: list[int], tree: tuple[int, list[int], list[int], list[int]]
) -> None:
    base, tokens, parents, neg_log_probs = tree
    texts = [tuple(log[: base + 1])]
    for token, parent, neg_log_prob in zip(tokens[1:], parents[1:], neg_log_probs[1:], strict=True):
        text = (*texts[parent], token)
        texts.append(text)
        if len(text) > len(log) and text[: len(log)] == tuple(log):
            paths.setdefault(text, neg_log_prob)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_held_are_the_paths_that_still_fit(seed: int) -> None:
    rng = random.Random(seed)
    log = [rng.randrange(4) for _ in range(3)]
    paths = Paths()
    foreseen = GuessTree()
    for _ in range(40):
        if rng.random() < 0.6:
            tree = told(rng, log)
            foreseen.add(log, *tree)
            remember(paths, log, tree)
        else:
            log += [rng.randrange(4) for _ in range(rng.randrange(3))]
            foreseen.follow(log)
        paths = {
            p: d for p, d in paths.items() if len(p) > len(log) and p[: len(log)] == tuple(log)
        }
        assert len(foreseen) == len(paths)
        tokens, parents, expected, is_known = foreseen.pick(1000, 0.0)
        texts = [tuple(log)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            assert parent < len(texts)
            texts.append((*texts[parent], token))
        assert set(texts[1:]) == set(paths)
        chances = [
            math.exp(-sum(paths[p[: n + 1]] for n in range(len(log), len(p))) / 8)
            for p in texts[1:]
        ]
        assert expected == pytest.approx(sum(chances))
        assert is_known == all(chance == 1.0 for chance in chances)
        assert chances == sorted(chances, reverse=True), (
            "the likeliest first, so that any beginning is the best draft"
        )
        assert all(foreseen.judge(path[len(log) :]) in ("likeliest", "branch") for path in paths)


def test_a_draft_and_what_is_held_are_no_larger_and_a_draft_no_less_likely_than_was_asked_for() -> (
    None
):
    foreseen = GuessTree()
    foreseen.add([7], 0, [7, 1, 2, 3], [-1, 0, 0, 1], [0, 6, 18, 0])
    assert foreseen.pick(9, 0.3)[:2] == ([7, 1, 3], [-1, 0, 1])
    assert foreseen.pick(1, 0.0)[:2] == ([7, 1], [-1, 0])
    assert foreseen.pick(9, 0.9)[:2] == ([7, 1], [-1, 0]), (
        "the best one, however unlikely: a stream may wait for it"
    )
    small = GuessTree(most=3)
    small.add([7], 0, [7, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4], [0] * 6)
    assert len(small) == 3
    assert small.pick(9, 0.0).tokens == [7, 1, 2, 3]


def test_a_draft_of_certain_guesses_alone_is_known_text() -> None:
    foreseen = GuessTree()
    foreseen.add([7], 0, [7, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [0, 0, 0, 1, 0])
    assert foreseen.pick(2, 0.0).is_known
    assert not foreseen.pick(3, 0.0).is_known
    assert not foreseen.pick(4, 0.0).is_known


def test_what_came_is_judged_by_what_was_told_and_what_is_not_held_is_found() -> None:
    foreseen = GuessTree()
    assert foreseen.judge([1]) == "beyond"
    foreseen.add([7], 0, [7, 1, 2, 3], [-1, 0, 0, 1], [0, 1, 9, 0])
    found = [foreseen.judge(path) for path in ([1, 3], [2], [1, 9], [1, 3, 3])]
    assert found == ["likeliest", "branch", "missed", "beyond"]
    assert foreseen.missing(DraftTree([7, 1, 3, 5, 6], [-1, 0, 1, 1, 3], [0.0] * 5)) == [3, 4]


def test_doubts_are_of_a_node_given_its_parent() -> None:
    tree = DraftTree([7, 1, 2, 3], [-1, 0, 1, 0], [0.0, math.log(0.5), math.log(0.05), -1e9])
    assert neg_log_probs_of(tree) == [0, 6, 18, 255]


def test_a_tree_grows_where_it_is_likeliest_and_keeps_what_is_below_its_new_root() -> None:
    growth = GuessTreeGrower(7)
    growth.expand([0], [[1, 2]], [[-0.1, -2.0]])
    assert growth.best(1) == [1]
    growth.expand([1], [[3, 4]], [[-0.2, -3.0]])
    assert growth.best(2) == [2, 3]
    assert growth.likeliest_open == pytest.approx(-0.3)
    assert growth.won([1, 3, 9]) == (2, False)
    assert growth.won([1, 9]) == (1, True)
    assert growth.won([9]) == (0, True)
    below, were = growth.below(1)
    assert (below.tree.tokens, below.tree.parents, below.depths) == (
        [1, 3, 4],
        [-1, 0, 0],
        [0, 1, 1],
    )
    assert below.tree.scores == pytest.approx([0.0, -0.2, -3.0])
    assert were == [1, 3, 4]
    assert list(below.open) == [1, 2]
