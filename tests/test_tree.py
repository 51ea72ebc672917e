"""The draft tree and the accept rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa.errors import ConfigError
from moa.tree import DraftTree, TreeGrower, TreeShape, accept, ancestors, depths


def parents_of(size: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(1, size))).map(
        lambda p: [-1, *p]
    )


trees = st.integers(1, 20).flatmap(
    lambda n: st.tuples(st.lists(st.integers(0, 3), min_size=n, max_size=n), parents_of(n))
)


@given(trees)
def test_ancestors_and_depths_match_a_walk_up_the_tree(tree: tuple[list[int], list[int]]) -> None:
    _, parents = tree
    chain = list(range(-1, len(parents) - 1))
    mask = ancestors(np.array([chain, parents]))[1]
    depth = depths(parents)
    for node in range(len(parents)):
        line = set()
        at = node
        while at >= 0:
            line.add(at)
            at = parents[at]
        assert set(np.flatnonzero(mask[node])) == line
        assert depth[node] == len(line) - 1


@given(trees, st.integers(0, 2**32 - 1))
def test_accept_gives_what_the_target_would_have_said_without_any_draft(
    tree: tuple[list[int], list[int]], seed: int
) -> None:
    tokens, parents = tree

    def target(text: tuple[int, ...]) -> int:  # any fixed function of the text so far
        return hash((seed, text)) % 4

    def text_of(node: int) -> tuple[int, ...]:
        return (*text_of(parents[node]), tokens[node]) if node >= 0 else ()

    accepted = accept(tokens, parents, lambda node: target(text_of(node)))
    said = [*(tokens[node] for node in accepted.path[1:]), accepted.next_token]
    plain = [tokens[0]]
    for token in said:
        assert token == target(tuple(plain))
        plain.append(token)
    # And it goes as far as the tree allows: no child of the last node holds the next token.
    last = accepted.path[-1]
    assert not any(
        parents[n] == last and tokens[n] == accepted.next_token for n in range(1, len(tokens))
    )


def grow(shape: TreeShape, table: np.ndarray) -> DraftTree:
    """Grow with a drafter whose scores depend on the last token alone."""
    grower = TreeGrower(0, shape)
    while grower.frontier:
        scores = table[grower.frontier_tokens]
        top = np.argsort(-scores, axis=1, kind="stable")
        grower.expand(top, np.take_along_axis(scores, top, axis=1))
    return grower.tree()


@pytest.fixture
def table() -> np.ndarray:
    logits = np.random.default_rng(0).normal(size=(12, 12)) * 2
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def test_the_dynamic_tree_holds_the_best_paths_of_its_breadth_and_depth(table: np.ndarray) -> None:
    tree = grow(TreeShape(breadth=3, depth=4, nodes=10), table)
    assert len(tree) == 11
    assert tree.parents[0] == -1
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        step = table[tree.tokens[parent], tree.tokens[node]]
        assert tree.scores[node] == pytest.approx(tree.scores[parent] + step, abs=1e-5)
    assert tree.depths().max() <= 4
    # The likeliest path of the whole tree is in it.
    best = 0.0
    token = 0
    for _ in range(2):
        best = best + table[token].max()
        token = int(table[token].argmax())
    assert max(s for s, d in zip(tree.scores, tree.depths(), strict=True) if d == 2) >= best - 1e-5


def test_the_mask_lets_a_frontier_node_see_its_ancestors_among_what_was_fed(
    table: np.ndarray,
) -> None:
    grower = TreeGrower(0, TreeShape(breadth=2, depth=3, nodes=20))
    while grower.frontier:
        mask = grower.mask()
        rows = [*grower.fed, *grower.frontier]
        assert mask.shape == (len(grower.frontier), len(rows))
        full = ancestors(np.array([grower.parents]))[0]
        for row, node in enumerate(grower.frontier):
            assert [rows[c] for c in np.flatnonzero(mask[row])] == sorted(
                np.flatnonzero(full[node]), key=rows.index
            )
        scores = table[grower.frontier_tokens]
        top = np.argsort(-scores, axis=1)[:, :2]
        grower.expand(top, np.take_along_axis(scores, top, axis=1))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_scores_that_are_no_numbers_leave_a_tree_of_the_others(
    table: np.ndarray, bad: float
) -> None:
    table = table.copy()
    table[:, ::3] = bad
    tree = grow(TreeShape(breadth=3, depth=4, nodes=20, min_score=-1e9), table)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert not np.isnan(tree.scores).any()
    assert any(np.isfinite(score) for score in tree.scores[1:])


@pytest.mark.parametrize(
    ("shape", "probabilities", "size", "deepest"),
    [
        (TreeShape.chain(5), [0.9, 0.1], 5, 5),
        (TreeShape(4, 3, 60), [0.6, 0.3, 0.06, 0.04], 36, 3),
        (TreeShape(4, 3, 10), [0.6, 0.3, 0.06, 0.04], 10, 3),
        # Nodes that are less likely than asked for are left out, but never the best.
        (TreeShape(4, 3, 60, least=math.log(0.05)), [0.6, 0.3, 0.06, 0.04], 14, 3),
        (TreeShape(4, 3, 60, least=math.log(0.5)), [0.3, 0.2], 1, 1),
        # It goes deeper while its nodes together are likely enough: two of 0.4 each go on where one
        # ends.
        (TreeShape(4, 9, 60, min_score=math.log(0.35)), [0.4], 2, 2),
        (TreeShape(4, 9, 60, min_score=math.log(0.35)), [0.4, 0.4], 14, 3),
        (TreeShape(4, 9, 60, min_score=math.log(0.2)), [0.4, 0.4], 22, 4),
    ],
)
def test_a_tree_is_as_large_and_as_deep_as_its_nodes_are_likely(
    shape: TreeShape, probabilities: list[float], size: int, deepest: int
) -> None:
    tree = grow(shape, np.log([probabilities] * len(probabilities)))
    assert (len(tree) - 1, max(tree.depths())) == (size, deepest)
    assert min(tree.scores) >= min(shape.least, tree.scores[1]) - 1e-6


@pytest.mark.parametrize("field", ["breadth", "depth", "nodes"])
def test_a_tree_has_at_least_one_of_everything(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TreeShape(**{field: 0})
