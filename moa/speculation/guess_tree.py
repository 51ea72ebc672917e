"""Guesses at the text after a log, which the edge sends ahead of answers and the verifier keeps.

A possible outcome ("k nodes accepted, then this bonus token") and the draft after it are one path
of a tree, so one tree contains the continuations of all outcomes, several rounds deep. Its root is
the log's last token. As the log grows, it moves along the tree; if it leaves the tree, there was no
guess. Both ends use `GuessTree`: the verifier for the guesses it received, the edge to know which
ones the verifier has. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moa.tree import DraftTree, path_of

STEP = 8
"""A `neg_log_prob` counts the negative logarithm of a node's probability, given its parent, in
parts of 1/8."""
MOST_NEG_LOG_PROB = 255
GuessOutcome = Literal["likeliest", "branch", "missed", "beyond"]
"""The outcome: the likeliest guess at every step was right, another one was, none was, or there was
none."""


class Picked(NamedTuple):
    """A draft, and how many of its nodes are expected to be accepted."""

    tokens: list[int]
    parents: list[int]
    expected: float


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    neg_log_prob: int
    children: dict[int, int] = field(default_factory=dict)
    """By token."""


def neg_log_probs_of(tree: DraftTree) -> list[int]:
    """Of each node, as sent."""
    own = (
        score - tree.scores[parent]
        for score, parent in zip(tree.scores[1:], tree.parents[1:], strict=True)
    )
    return [0, *(min(MOST_NEG_LOG_PROB, max(0, round(-STEP * score))) for score in own)]


class GuessTree:
    """A tree of guesses below the end of a growing log; bounded."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._nodes: list[_Node] = []
        self._length = 0
        """Length of the log when it was last followed."""

    def __len__(self) -> int:
        return max(0, len(self._nodes) - 1)

    def clear(self) -> None:
        """Forget everything."""
        self._nodes.clear()

    def follow(self, log: Sequence[int]) -> None:
        """Move along the log's new tokens, and drop guesses that are not below its end."""
        at = 0
        new = log[self._length :] if self._nodes else ()
        self._length = len(log)
        for token in new:
            found = self._nodes[at].children.get(token)
            if found is None:
                self._nodes.clear()
                break
            at = found
        if at and self._nodes:
            self._root_at(at)
        if not self._nodes:
            self._nodes.append(_Node(log[-1], -1, 0))

    def add(
        self,
        log: Sequence[int],
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        neg_log_probs: Sequence[int],
    ) -> int:
        """Add a tree whose root is the token at position `base` of the log; returns how many
        guesses are new. Nodes that the log has passed are skipped; nodes that contradict it are
        dropped."""
        self.follow(log)
        if not 0 <= base < len(log) or log[base] != tokens[0]:
            return 0
        before = len(self._nodes)
        # A place is a node or, if negative, a number of tokens before the log's end; None
        # contradicts the log.
        places: list[int | None] = [base - len(log) + 1]
        for token, parent, neg_log_prob in zip(
            tokens[1:], parents[1:], neg_log_probs[1:], strict=True
        ):
            at = places[parent]
            if at is None:
                places.append(None)
            elif at < 0:
                places.append(at + 1 if log[at] == token else None)
            else:
                places.append(self._child(at, token, neg_log_prob))
        return len(self._nodes) - before

    def judge(self, path: Sequence[int]) -> GuessOutcome:
        """Whether these tokens after the log's end were guessed, and how likely."""
        if not self._nodes:
            return "beyond"
        at = 0
        first = True
        for token in path:
            children = self._nodes[at].children
            if token not in children:
                return "missed" if children else "beyond"
            at = children[token]
            first &= all(
                self._nodes[at].neg_log_prob <= self._nodes[other].neg_log_prob
                for other in children.values()
            )
        return "likeliest" if first else "branch"

    def missing(self, tree: DraftTree) -> list[int]:
        """The nodes of a tree at the log's end that are not held."""
        places: list[int | None] = [0 if self._nodes else None]
        missing = []
        for node in range(1, len(tree)):
            at = places[tree.parents[node]]
            place = None if at is None else self._nodes[at].children.get(tree.tokens[node])
            places.append(place)
            if place is None:
                missing.append(node)
        return missing

    def pick(self, most: int, least: float, *, branches: bool = True) -> Picked:
        """The likeliest nodes below the end as a draft: at most so many, none less likely than
        `least` but the best. Without `branches`, a chain: the likeliest child of each."""
        tokens = [self._nodes[0].token] if self._nodes else []
        parents = [-1]
        expected = 0.0
        waiting = self._below(0, 0, 0) if self._nodes else []
        heapq.heapify(waiting)
        while waiting and len(tokens) <= most:
            neg_log_prob, node, parent = heapq.heappop(waiting)
            chance = math.exp(-neg_log_prob / STEP)
            if chance < least and len(tokens) > 1:
                break
            expected += chance
            if not branches:
                waiting.clear()
            for child in self._below(node, len(tokens), neg_log_prob):
                heapq.heappush(waiting, child)
            tokens.append(self._nodes[node].token)
            parents.append(parent)
        return Picked(tokens, parents, expected)

    def _below(self, node: int, place: int, neg_log_prob: int) -> list[tuple[int, int, int]]:
        return [
            (neg_log_prob + self._nodes[child].neg_log_prob, child, place)
            for child in self._nodes[node].children.values()
        ]

    def _child(self, at: int, token: int, neg_log_prob: int) -> int | None:
        known = self._nodes[at].children.get(token)
        if known is None and len(self) < self._most:
            known = self._nodes[at].children[token] = len(self._nodes)
            self._nodes.append(_Node(token, at, neg_log_prob))
        return known

    def _root_at(self, root: int) -> None:
        """Keep the nodes below this one; parents come before their children, so one pass is enough."""
        index = {root: 0}
        kept = [_Node(self._nodes[root].token, -1, 0)]
        for node in range(root + 1, len(self._nodes)):
            old = self._nodes[node]
            if (parent := index.get(old.parent)) is not None:
                index[node] = kept[parent].children[old.token] = len(kept)
                kept.append(_Node(old.token, parent, old.neg_log_prob))
        self._nodes = kept


@dataclass(slots=True)
class GuessTreeGrower:
    """The edge's tree of guesses, grown at its likeliest nodes, a few at a time.

    growth = GuessTreeGrower(log[-1])
    nodes = growth.best(4)               # run the drafter on them
    growth.expand(nodes, top_tokens, top_logp)
    """

    root: int
    tree: DraftTree = field(init=False)
    depths: list[int] = field(init=False)
    open: dict[int, None] = field(init=False)
    """Nodes that the drafter has not run."""

    def __post_init__(self) -> None:
        self.tree = DraftTree([self.root], [-1], [0.0])
        self.depths = [0]
        self.open = {0: None}

    def copy(self) -> GuessTreeGrower:
        """The same tree, to be grown while another thread reads this one."""
        new = GuessTreeGrower(self.root)
        new.tree = DraftTree(
            list(self.tree.tokens), list(self.tree.parents), list(self.tree.scores)
        )
        new.depths = list(self.depths)
        new.open = dict(self.open)
        return new

    @property
    def likeliest_open(self) -> float:
        """Log-probability of the likeliest open node."""
        return max((self.tree.scores[node] for node in self.open), default=-math.inf)

    def best(self, most: int) -> list[int]:
        """The likeliest open nodes."""
        return sorted(sorted(self.open, key=self.tree.scores.__getitem__, reverse=True)[:most])

    def expand(
        self,
        nodes: Sequence[int],
        top_tokens: Sequence[Sequence[int]],
        top_logp: Sequence[Sequence[float]],
    ) -> None:
        """Take the drafter's best guesses after each of these nodes, best first."""
        tree = self.tree
        for node, tokens, scores in zip(nodes, top_tokens, top_logp, strict=True):
            del self.open[node]
            for token, score in zip(tokens, scores, strict=True):
                self.open[len(tree)] = None
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.scores.append(tree.scores[node] + score)
                self.depths.append(self.depths[node] + 1)

    def path(self, node: int) -> list[int]:
        """The tokens from the root, which is left out, to this node."""
        return path_of(self.tree.tokens, self.tree.parents, node)

    def find(self, path: Sequence[int]) -> list[int] | None:
        """The nodes of these tokens after the root, or None if they were not guessed."""
        children = {
            (p, t): n
            for n, (p, t) in enumerate(zip(self.tree.parents, self.tree.tokens, strict=True))
        }
        nodes = []
        at = 0
        for token in path:
            found = children.get((at, token))
            if found is None:
                return None
            nodes.append(at := found)
        return nodes

    def won(self, path: Sequence[int]) -> tuple[int, bool]:
        """How many of these tokens after the root were guessed, and whether the next one was
        guessed wrong."""
        known = len(path)
        while (nodes := self.find(path[:known])) is None:
            known -= 1
        return known, known < len(path) and (nodes[-1] if nodes else 0) not in self.open

    def below(self, root: int) -> tuple[GuessTreeGrower, list[int]]:
        """The subtree of a node as a new growth, and the earlier index of each of its nodes."""
        tree, kept = self.tree, GuessTreeGrower(self.tree.tokens[root])
        were = [root]
        index = {root: 0}
        kept.open = {0: None} if root in self.open else {}
        for node in range(root + 1, len(tree)):
            if (parent := index.get(tree.parents[node])) is None:
                continue
            index[node] = len(were)
            if node in self.open:
                kept.open[len(were)] = None
            were.append(node)
            kept.tree.tokens.append(tree.tokens[node])
            kept.tree.parents.append(parent)
            kept.tree.scores.append(tree.scores[node] - tree.scores[root])
            kept.depths.append(self.depths[node] - self.depths[root])
        return kept, were
