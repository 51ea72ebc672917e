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
Float = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """The pair head's two vectors of every token `[V, rank]`; of a reduced vocabulary, `ids` are the tokens, rising."""

    before: Float
    after: Float
    ids: Ids | None = None

    def fit(self, previous: Sequence[int], gates: Float, candidates: Ids) -> NDArray[np.float32]:
        """How much likelier each candidate is after each of the previous tokens: `[previous, candidates]`."""
        left, right = self.before[self._rows(np.array(previous))], self.after[self._rows(candidates)]
        left, right = left.astype(np.float32) * gates, right.astype(np.float32)
        fit: NDArray[np.float32] = left @ right.T
        return fit

    def _rows(self, tokens: Ids) -> Ids:
        return tokens if self.ids is None else np.searchsorted(self.ids, tokens)


@dataclass(frozen=True)
class Said:
    """What one pass says of each position: its likeliest tokens `[N, K]`, best first, their log-probabilities, and the
    pair head's gates `[N, rank]`."""

    tokens: Ids
    logp: NDArray[np.float32]
    gates: NDArray[np.float32]

    def after(self, place: int, previous: Sequence[int], pairs: Pairs, scale: float) -> tuple[Ids, NDArray[np.float32]]:
        """The tokens at `place` behind each of the `previous` ones, best first, with their log-probabilities.

        Only these tokens are weighed anew: all others together keep their probability from the pass.
        """
        tokens, logp = self.tokens[place], self.logp[place]
        if place == 0:
            return self.tokens[:1], self.logp[:1]
        scores = logp + scale * pairs.fit(previous, self.gates[place], tokens)
        others = max(1e-9, 1.0 - float(np.exp(logp).sum()))
        whole = np.logaddexp(np.logaddexp.reduce(scores, axis=1, keepdims=True), np.log(others))
        scores = (scores - whole).astype(np.float32)
        order = np.argsort(-scores, axis=1, kind="stable")
        return tokens[order], np.take_along_axis(scores, order, axis=1)


def draft_block(root: int, shape: TreeShape, said: Said, pairs: Pairs, scale: float = 1.0) -> DraftTree:
    """The tree of this shape, no deeper than the block. `scale` is what the logits were multiplied by, as for a
    temperature."""
    grower = TreeGrower(root, replace(shape, depth=min(shape.depth, len(said.tokens))))
    while grower.frontier:
        grower.expand(*said.after(grower.level, grower.frontier_tokens, pairs, scale))
    return grower.tree()
