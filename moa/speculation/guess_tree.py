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
    """A draft that was picked among guesses."""

    tokens: list[int]
    parents: list[int]
    expected: float
    """How many of its nodes are expected to be accepted."""
    is_known: bool
    """Whether each node was sent with probability 1, as text that the edge has already is."""


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    neg_log_prob: int
    """Of the token given its parent, in parts of 1 / STEP."""
    children: dict[int, int] = field(default_factory=dict)
    """Nodes by token."""


class _Candidate(NamedTuple):
    """A node that may be picked next. Of equally likely ones the earlier node is the smaller."""

    path_neg_log_prob: int
    """Of all tokens from the root to the node."""
    node: int
    parent: int
    """The index under which its parent was picked."""


def neg_log_probs_of(tree: DraftTree) -> list[int]:
    """The `neg_log_prob` of each node of a draft, as it is sent; 0 for the root."""
    neg_log_probs = [0]
    for score, parent in zip(tree.scores[1:], tree.parents[1:], strict=True):
        log_prob = score - tree.scores[parent]  # scores are sums along the path
        parts = round(-STEP * log_prob)
        neg_log_probs.append(min(MOST_NEG_LOG_PROB, max(0, parts)))
    return neg_log_probs


def _positions_in(
    log: Sequence[int], base: int, tokens: Sequence[int], parents: Sequence[int]
) -> dict[int, int]:
    """The nodes of a tree whose root is the token at position `base` of the log that the log has
    gone along since, and the position of each in the log."""
    positions = {0: base}
    end = len(log) - 1
    if base == end:
        return positions
    for node in range(1, len(tokens)):
        position = positions.get(parents[node], end) + 1
        if position <= end and log[position] == tokens[node]:
            positions[node] = position
    return positions


class GuessTree:
    """A tree of guesses below the end of a growing log; bounded."""

    def __init__(self, most: int = 512) -> None:
        """`most` guesses are kept; further ones are dropped."""
        self._most = most
        self._nodes: list[_Node] = []
        """Node 0 is the log's last token; empty before the first `follow`."""
        self._length = 0
        """Length of the log when it was last followed."""

    def __len__(self) -> int:
        """The number of guesses: all nodes but the root."""
        return max(0, len(self._nodes) - 1)

    def clear(self) -> None:
        """Forget everything."""
        self._nodes.clear()

    def follow(self, log: Sequence[int]) -> None:
        """Move the tree's root to the end of the log, the text so far, which has grown: along its
        new tokens. Guesses that are not below the new root are dropped, all of them if the log has
        left the tree."""
        if self._nodes:
            root = self._node_after(log[self._length :])
            if root is None:
                self._nodes.clear()
            elif root > 0:
                self._root_at(root)
        if not self._nodes:
            self._nodes.append(_Node(token=log[-1], parent=-1, neg_log_prob=0))
        self._length = len(log)

    def add(
        self,
        log: Sequence[int],
        base: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        neg_log_probs: Sequence[int],
    ) -> int:
        """Add guesses that were sent: a tree whose root is the token at position `base` of the log,
        the text so far, which may have gone on since. Nodes that the log has passed are skipped;
        nodes that contradict it are dropped. Returns how many guesses are new."""
        self.follow(log)
        if not 0 <= base < len(log) or log[base] != tokens[0]:
            return 0
        before = len(self._nodes)
        end = len(log) - 1
        # Of nodes of the sent tree that are at the log's end or below: their numbers in ours, where
        # 0 is the log's last token. A node without one is left out, and all below it with it.
        ours: dict[int, int] = {}
        for node, position in _positions_in(log, base, tokens, parents).items():
            if position == end:
                ours[node] = 0
        for node in range(1, len(tokens)):
            parent = ours.get(parents[node])
            if parent is None:
                continue
            child = self._find_or_add(parent, tokens[node], neg_log_probs[node])
            if child is not None:
                ours[node] = child
        return len(self._nodes) - before

    def judge(self, path: Sequence[int]) -> GuessOutcome:
        """How well these tokens after the log's end were guessed: by the likeliest guess at every
        step (`likeliest`), by other guesses too (`branch`), wrongly (`missed`), or not at all,
        because no guesses reach so far (`beyond`)."""
        if not self._nodes:
            return "beyond"
        node = 0
        always_likeliest = True
        for token in path:
            children = self._nodes[node].children
            if not children:
                return "beyond"
            if token not in children:
                return "missed"
            node = children[token]
            likeliest = min(self._nodes[child].neg_log_prob for child in children.values())
            if self._nodes[node].neg_log_prob > likeliest:
                always_likeliest = False
        return "likeliest" if always_likeliest else "branch"

    def missing(self, tree: DraftTree) -> list[int]:
        """The nodes of a draft, a tree at the log's end, that are not among these guesses yet."""
        # Our node for each node of the draft; None: there is none.
        ours: list[int | None] = [0 if self._nodes else None]
        missing = []
        for node in range(1, len(tree)):
            parent = ours[tree.parents[node]]
            found = None
            if parent is not None:
                found = self._nodes[parent].children.get(tree.tokens[node])
            ours.append(found)
            if found is None:
                missing.append(node)
        return missing

    def pick(self, most: int, least: float, *, branches: bool = True) -> Picked:
        """Pick the likeliest guesses as a draft, a tree whose root is the log's last token: at most
        `most` of them, and none whose whole path is less likely than `least`, but one in any case.
        Without `branches` it is a chain, the likeliest child of each node."""
        if not self._nodes:
            return Picked(tokens=[], parents=[-1], expected=0.0, is_known=True)
        tokens = [self._nodes[0].token]
        parents = [-1]
        expected = 0.0
        is_known = True
        # Nodes whose parent is picked, the likeliest first.
        candidates: list[_Candidate] = []
        self._push_children(candidates, node=0, picked_as=0, path_neg_log_prob=0)
        while candidates and len(tokens) <= most:
            best = heapq.heappop(candidates)
            chance = math.exp(-best.path_neg_log_prob / STEP)
            if chance < least and len(tokens) > 1:
                break
            expected += chance  # each node is one more accepted token if its whole path is right
            is_known = is_known and best.path_neg_log_prob == 0
            if not branches:
                candidates.clear()  # only the children of this node come next
            self._push_children(
                candidates,
                node=best.node,
                picked_as=len(tokens),
                path_neg_log_prob=best.path_neg_log_prob,
            )
            tokens.append(self._nodes[best.node].token)
            parents.append(best.parent)
        return Picked(tokens, parents, expected, is_known)

    def _push_children(
        self, candidates: list[_Candidate], *, node: int, picked_as: int, path_neg_log_prob: int
    ) -> None:
        """Make the children of a node candidates; the node itself was picked under that index."""
        for child in self._nodes[node].children.values():
            whole_path = path_neg_log_prob + self._nodes[child].neg_log_prob
            heapq.heappush(candidates, _Candidate(whole_path, child, picked_as))

    def _find_or_add(self, parent: int, token: int, neg_log_prob: int) -> int | None:
        """The child of a node that has this token. It is made if there is none, or None is returned
        if the tree has as many guesses as it may."""
        children = self._nodes[parent].children
        if token in children:
            return children[token]
        child = len(self._nodes)
        if child > self._most:  # node 0 is no guess
            return None
        children[token] = child
        self._nodes.append(_Node(token, parent, neg_log_prob))
        return child

    def _node_after(self, path: Sequence[int]) -> int | None:
        """The node that these tokens lead to from the root; None if they leave the tree."""
        node = 0
        for token in path:
            child = self._nodes[node].children.get(token)
            if child is None:
                return None
            node = child
        return node

    def _root_at(self, root: int) -> None:
        """Make a node the root: keep it and the nodes below it, and number them anew. Parents come
        before their children, so one pass is enough."""
        kept = [_Node(token=self._nodes[root].token, parent=-1, neg_log_prob=0)]
        new_index = {root: 0}
        for node in range(root + 1, len(self._nodes)):
            old = self._nodes[node]
            parent = new_index.get(old.parent)
            if parent is None:
                continue
            new_index[node] = len(kept)
            kept[parent].children[old.token] = len(kept)
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
    """Nodes that the drafter has not run: a dict without values, as a set that keeps its order."""

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
        """The likeliest open nodes, `most` of them at most, in the order of the tree."""
        likeliest_first = sorted(self.open, key=self.tree.scores.__getitem__, reverse=True)
        return sorted(likeliest_first[:most])

    def expand(
        self,
        nodes: Sequence[int],
        top_tokens: Sequence[Sequence[int]],
        top_logp: Sequence[Sequence[float]],
    ) -> None:
        """Add the drafter's best guesses after each of these nodes, which it has run now, as their
        children: tokens and log-probabilities, best first. The nodes are no longer `open` (not
        run), their children are."""
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
        nodes = self._guessed(path)
        return nodes if len(nodes) == len(path) else None

    def won(self, path: Sequence[int]) -> tuple[int, bool]:
        """How many of these tokens after the root were guessed, and whether the next one was
        guessed wrong."""
        nodes = self._guessed(path)
        last = nodes[-1] if nodes else 0
        # An open node has no guesses below it yet: nothing is wrong there.
        next_is_wrong = len(nodes) < len(path) and last not in self.open
        return len(nodes), next_is_wrong

    def _guessed(self, path: Sequence[int]) -> list[int]:
        """The nodes that these tokens lead along from the root, as far as they were guessed."""
        children: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(self.tree.parents, self.tree.tokens, strict=True)):
            children[edge] = node
        nodes: list[int] = []
        parent = 0
        for token in path:
            child = children.get((parent, token))
            if child is None:
                break
            nodes.append(child)
            parent = child
        return nodes

    def below(self, root: int) -> tuple[GuessTreeGrower, list[int]]:
        """The part of the tree below a node, as a tree of its own with that node as its root; and
        for each of its nodes the number that it has in this one."""
        tree = self.tree
        subtree = GuessTreeGrower(tree.tokens[root])
        subtree.open = {0: None} if root in self.open else {}
        earlier_index = [root]
        new_index = {root: 0}
        for node in range(root + 1, len(tree)):
            parent = new_index.get(tree.parents[node])
            if parent is None:
                continue
            new_node = len(earlier_index)
            new_index[node] = new_node
            earlier_index.append(node)
            if node in self.open:
                subtree.open[new_node] = None
            subtree.tree.tokens.append(tree.tokens[node])
            subtree.tree.parents.append(parent)
            subtree.tree.scores.append(tree.scores[node] - tree.scores[root])
            subtree.depths.append(self.depths[node] - self.depths[root])
        return subtree, earlier_index
