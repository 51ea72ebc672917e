"""The draft tree and the acceptance rule, shared by both ends. Numpy only.

Node 0 is the *pending* token: the last one emitted, which the target has not run yet. Its children
are guesses for the next position, and so on. A chain is a tree of breadth 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moa.errors import ConfigError

Mask = NDArray[np.bool_]
MASKED = -1e9
"""What an additive attention mask holds where a token may not look. Finite, so that a row in which
everything is masked does not become NaN."""
FORBIDDEN = MASKED / 2
"""A score below this is that of a token which was masked."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How far to draft: `breadth` guesses per expanded node and `breadth` nodes expanded per level,
    `depth` levels, of which the `nodes` best by cumulative score go to the target. The defaults are
    EAGLE-2's dynamic tree."""

    breadth: int = 8
    depth: int = 6
    nodes: int = 62
    min_score: float = -12.0
    """Stop going deeper when the log-probability that the text goes on along the nodes to expand is
    below this."""
    least: float = -math.inf
    """Leave out nodes whose path has a lower log-probability than this, save the best."""

    def __post_init__(self) -> None:
        for name in ("breadth", "depth", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tree {name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def chain(cls, depth: int, *, min_score: float = -12.0) -> TreeShape:
        """One guess after another."""
        return cls(breadth=1, depth=depth, nodes=depth, min_score=min_score)


@dataclass(slots=True)
class DraftTree:
    """Tokens with their parents; every parent comes before its children."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> NDArray[np.int64]:
        """Distance of every node from the root."""
        return depths(self.parents)


def additive(visible: Mask) -> NDArray[np.float32]:
    """The additive attention mask of what is `visible`."""
    return np.where(visible, np.float32(0), np.float32(MASKED))


def ancestors(parents: NDArray[np.int64]) -> Mask:
    """For each node of B trees which nodes are its ancestors or itself, as flags `[B, T, T]`. Trees
    are given by each node's parent, `[B, T]`, -1 where there is none. All are found at once by
    pointer doubling: each round looks twice as far up."""
    batch, size = parents.shape
    # All trees as one list of nodes, with a last one, which has no ancestors, as "no parent".
    no_parent = batch * size
    nodes = np.arange(no_parent)
    first_nodes = np.arange(0, no_parent, size, dtype=np.int64)[:, None]
    # After k rounds `seen` has all ancestors nearer than 2**k, and `jump` the one 2**k away.
    seen = np.zeros((no_parent + 1, size), dtype=np.bool_)
    seen[nodes, nodes % size] = True
    jump = np.full(no_parent + 1, no_parent, dtype=np.int64)
    jump[:-1] = np.where(parents < 0, no_parent, parents + first_nodes).ravel()
    while (jump != no_parent).any():
        seen |= seen[jump]
        jump = jump[jump]
    return seen[:-1].reshape(batch, size, size)


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """Distance of every node from its root; a parent of -1 is a root."""
    out = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            out[node] = out[parent] + 1
    return out


def path_of(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens from node 0, which is left out, to this node."""
    path: list[int] = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The target's decision about a tree: the accepted nodes, node 0 first, and the target's token
    after the last one."""

    path: list[int]
    next_token: int


def walk(tokens: Sequence[int], parents: Sequence[int]) -> Generator[int, int, Accepted]:
    """Walk down a draft tree from its root, node 0, along the target's choices for as long as they
    are in the tree: the nodes on the way are accepted.

    Yields a node, and is sent the target's token after it: the same function of logits, sampling
    settings, seed and position that decides without a draft. That is why speculation cannot change
    the text.
    """
    children: dict[tuple[int, int], int] = {}
    # Backwards, so that of equal siblings the first wins.
    for node in range(len(tokens) - 1, 0, -1):
        children[parents[node], tokens[node]] = node
    path = [0]
    while True:
        token = yield path[-1]
        child = children.get((path[-1], token))
        if child is None:
            return Accepted(path, token)
        path.append(child)


def accept(tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int], int]) -> Accepted:
    """Decide about a draft tree: walk down it from its root (`walk`), where `choose(node)` returns
    the target's token after a node."""
    steps = walk(tokens, parents)
    node = next(steps)
    while True:
        try:
            node = steps.send(choose(node))
        except StopIteration as end:
            accepted: Accepted = end.value
            return accepted


@dataclass(slots=True)
class TreeGrower:
    """Grows EAGLE-2's dynamic tree level by level; the caller runs the drafter on each `frontier`.

    grower = TreeGrower(pending, shape)
    while grower.frontier:
        top_tokens, top_scores = <run the drafter on grower.frontier, masked by grower.mask()>
        grower.expand(top_tokens, top_scores)
    tree = grower.tree()
    """

    root: int
    shape: TreeShape
    frontier: list[int] = field(init=False)
    """Nodes to expand next."""
    fed: list[int] = field(init=False, default_factory=list)
    """Nodes the drafter has run, in the order of its cache rows."""
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    scores: list[float] = field(init=False)
    level: int = field(init=False, default=0)
    """Depth of the frontier's nodes: 0 for the pending token."""

    def __post_init__(self) -> None:
        self.frontier = [0]
        self.tokens = [self.root]
        self.parents = [-1]
        self.scores = [0.0]

    @property
    def frontier_tokens(self) -> list[int]:
        """The tokens to feed to the drafter."""
        return [self.tokens[node] for node in self.frontier]

    def path(self, node: int) -> list[int]:
        """The tokens from the root, which is left out, to this node."""
        return path_of(self.tokens, self.parents, node)

    def mask(self) -> Mask:
        """The attention mask of the frontier, the nodes that the drafter runs next: `[frontier, fed
        + frontier]`, over the nodes that it has run (fed), in this order, and the frontier. A node
        sees its ancestors and itself."""
        columns = {node: column for column, node in enumerate([*self.fed, *self.frontier])}
        mask = np.zeros((len(self.frontier), len(columns)), dtype=np.bool_)
        for row, node in enumerate(self.frontier):
            ancestor = node
            while ancestor >= 0:
                mask[row, columns[ancestor]] = True
                ancestor = self.parents[ancestor]
        return mask

    def expand(self, top_tokens: NDArray[np.int64], top_scores: NDArray[np.float32]) -> None:
        """Grow the tree by a level: add the drafter's best guesses after each node of the frontier,
        `[frontier, k]` tokens and log-probabilities, best first; the likeliest of them are the next
        frontier.

        A score that is no number is the worst there is: it would leave the order of the others
        undefined. Guesses that a grammar forbids are left out.
        """
        breadth = min(self.shape.breadth, top_tokens.shape[1])
        first_new = len(self.tokens)
        for node, tokens, scores in zip(
            self.frontier,
            top_tokens[:, :breadth].tolist(),
            top_scores[:, :breadth].tolist(),
            strict=True,
        ):
            for token, score in zip(tokens, scores, strict=True):
                self._add_guess(node, token, score)
        self.fed += self.frontier
        self.level += 1
        self.frontier = self._next_frontier(first_new)

    def _add_guess(self, parent: int, token: int, score: float) -> None:
        """Add a node, unless a grammar forbids its token: such a score is finite, but very low."""
        if FORBIDDEN > score > -math.inf:
            return
        is_number = score < math.inf  # also False for NaN
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(self.scores[parent] + score if is_number else -math.inf)

    def _next_frontier(self, first_new: int) -> list[int]:
        """The nodes to expand next: the likeliest of those from number `first_new` on, in the order
        of the tree. None where the tree is deep enough, or where it is unlikely that the text goes
        on along any of them."""
        if self.level >= self.shape.depth:
            return []
        new = range(first_new, len(self.tokens))
        best = sorted(new, key=self.scores.__getitem__, reverse=True)[: self.shape.breadth]
        likely = [node for node in best if self.scores[node] >= self.shape.least]
        chance = sum(math.exp(self.scores[node]) for node in likely)
        if chance < math.exp(self.shape.min_score):
            return []
        return sorted(likely)

    def tree(self) -> DraftTree:
        """The draft: the root, and of all guesses the `shape.nodes` likeliest. A child is never
        likelier than its parent, so that the likeliest nodes are a tree."""
        # Sorting is stable, also in reverse: equal scores keep their order.
        ranked = sorted(range(1, len(self.tokens)), key=self.scores.__getitem__, reverse=True)
        best = ranked[: self.shape.nodes]
        likely = [node for node in best if self.scores[node] >= self.shape.least]
        kept = [0, *sorted(likely or best[:1])]
        new_index = {node: index for index, node in enumerate(kept)}
        new_index[-1] = -1  # the root has no parent
        return DraftTree(
            tokens=[self.tokens[node] for node in kept],
            parents=[new_index[self.parents[node]] for node in kept],
            scores=[self.scores[node] for node in kept],
        )
