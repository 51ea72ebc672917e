"""A draft from one pass: what the drafter says of every position of a block, and the walk that makes a chain or a tree.

The pass says for each position which tokens are likely after the text, whatever stands between. The pair head says how
well two neighbours fit. Its sum is a product of three vectors, so that a walk needs no model:

    logit(token | previous) = logit(token) + sum(before[previous] * gates[position] * after[token])

Only the first position, whose previous token is the text's last, needs no pair. Numpy only, for both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa.tree import DraftTree, TreeGrower, TreeShape

GATES = "gates"
"""Name of the graphs' output."""


@dataclass(frozen=True)
class Pairs:
    """The pair head's two vectors of every token `[V, rank]`; of a reduced vocabulary, `ids` are the tokens, rising."""

    before: NDArray[np.floating[Any]]
    after: NDArray[np.floating[Any]]
    ids: NDArray[np.int64] | None = None

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where their vectors are."""
        return tokens if self.ids is None else np.searchsorted(self.ids, tokens)


@dataclass(frozen=True)
class Said:
    """What one pass says of each position: its likeliest tokens `[N, K]`, best first, their log-probabilities, and the
    pair head's gates `[N, rank]`."""

    tokens: NDArray[np.int64]
    logp: NDArray[np.float32]
    gates: NDArray[np.float32]


class Walk:
    """The choice of a token at each position, given the one before it."""

    def __init__(self, said: Said, pairs: Pairs, scale: float = 1.0) -> None:
        """`scale` is what the logits were multiplied by, as for a temperature."""
        self._said, self._pairs = said, pairs
        after = pairs.after[pairs.rows(said.tokens)].astype(np.float32)
        self._likes = after * (scale * said.gates)[:, None]
        self._others = np.maximum(1e-9, 1.0 - np.exp(said.logp).sum(axis=1))

    def after(self, place: int, previous: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The tokens at `place` behind each of the `previous` ones, best first, with their log-probabilities.

        Only the likeliest tokens are weighed anew: all others together keep their probability from the pass.
        """
        tokens, logp = self._said.tokens[place], self._said.logp[place]
        if place == 0:
            return tokens[None], logp[None]
        known = self._pairs.before[self._pairs.rows(np.array(previous))].astype(np.float32)
        scores = logp + known @ self._likes[place].T
        best = scores.max(axis=1, keepdims=True)
        whole = best + np.log(np.exp(scores - best).sum(axis=1, keepdims=True) + self._others[place] * np.exp(-best))
        order = (-scores).argsort(axis=1, kind="stable")
        return tokens[order], np.take_along_axis(scores - whole, order, axis=1)


def draft_block(root: int, shape: TreeShape, said: Said, pairs: Pairs, scale: float = 1.0) -> DraftTree:
    """The tree of this shape, no deeper than the block."""
    walk = Walk(said, pairs, scale)
    grower = TreeGrower(root, replace(shape, depth=min(shape.depth, len(said.tokens))))
    while grower.frontier:
        grower.expand(*walk.after(grower.level, grower.frontier_tokens))
    return grower.tree()
