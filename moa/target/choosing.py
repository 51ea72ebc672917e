"""From a forward to the accepted nodes of each row's draft. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa.errors import NumericalError
from moa.grammar.matcher import Bits, unpacked
from moa.logprobs import pack
from moa.sampling import NO_LOGITS, SamplingSettings, choose
from moa.target.contract import NO_NUMBER, Chooser, Draw, Node, Step
from moa.tree import Accepted, accept, walk


class Judged(NamedTuple):
    """A row's draft, its log up to and including node 0, the sampling settings, and under a grammar
    the mask after each node (`moa.grammar.matcher.TextMask.judge`)."""

    tokens: Sequence[int]
    parents: Sequence[int]
    log: Sequence[int]
    sampling: SamplingSettings
    masks: Sequence[Bits | None] | None = None
    start: int = 0
    """Where the answer begins in the log."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen after every node, whatever the log is."""
        return self.sampling.plain_greedy and self.masks is None

    def mask(self, node: int) -> Bits | None:
        """What a grammar allows after a node; None: everything."""
        return None if self.masks is None else self.masks[node]


def accept_rows(step: Step, rows: Sequence[Judged]) -> list[Accepted]:
    """Decide about the draft of each row of a forward: which of its nodes (drafted tokens, in a
    tree) the target accepts, because they are what it chooses itself, and which token it chooses
    after the last of them. `step` has the forward's results."""
    accepted: dict[int, Accepted] = {}
    sampled: dict[int, Judged] = {}
    for b, row in enumerate(rows):
        if row.greedy:
            choices = step.argmax(b).tolist()
            accepted[b] = accept(row.tokens, row.parents, choices.__getitem__)
        else:
            sampled[b] = row
    if sampled and step.choose is not None:
        accepted |= _accept_at_once(step.choose, sampled)
    elif sampled:
        accepted |= _accept_by_level(step, sampled)
    return [accepted[b] for b in range(len(rows))]


def _accept_at_once(choose_all: Chooser, rows: dict[int, Judged]) -> dict[int, Accepted]:
    """Decide about the drafts of these rows, by their number in the forward. The token after every
    node is chosen at once by `choose_all`, which runs where the logits are: they never travel to
    the host. Then each draft is walked from its root along the chosen tokens."""
    nodes = []
    draws = []
    for b, row in rows.items():
        for node, drafted in enumerate(_drafted_before(row)):
            # A choice depends on the text before it, which for a node ends with its path.
            nodes.append(Node(b, node))
            draws.append(
                Draw(
                    settings=row.sampling,
                    position=len(row.log) + len(drafted),
                    text=row.log,
                    drafted=drafted,
                    allowed=row.mask(node),
                    start=row.start,
                )
            )
    chosen = iter(choose_all(nodes, draws))
    accepted = {}
    for b, row in rows.items():
        choices = [next(chosen) for _ in row.tokens]
        if NO_NUMBER in choices:
            raise NumericalError(NO_LOGITS)
        accepted[b] = accept(row.tokens, row.parents, choices.__getitem__)
    return accepted


def _drafted_before(row: Judged) -> list[list[int]]:
    """For each node of a draft the tokens of the path to it, without node 0, with which the text so
    far (`log`) ends already."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths


@dataclass
class _Walk:
    """A row on its way down its draft."""

    row: Judged
    steps: Generator[int, int, Accepted]
    """Asks for the target's token after a node, and is told it."""
    node: int
    """The node that is asked for."""
    penalized: NDArray[np.int64]
    """The tokens that the repetition penalty applies to: the distinct ones of the log, found once
    and not for every node, then those of `path`."""
    path: list[int] = field(default_factory=list)
    """The tokens after node 0 so far."""

    def go_on(self, token: int) -> Accepted | None:
        """Go to the node of the target's token. Returns what was accepted where there is none."""
        try:
            self.node = self.steps.send(token)
        except StopIteration as end:
            accepted: Accepted = end.value
            return accepted
        self.path.append(token)
        self.penalized = np.append(self.penalized, token)
        return None


def _accept_by_level(step: Step, rows: dict[int, Judged]) -> dict[int, Accepted]:
    """Decide about the drafts of these rows, by their number in the forward. The host chooses, and
    only after the nodes that are reached: all rows go down their drafts side by side, and the
    logits of the nodes where they stand are read at once."""
    accepted: dict[int, Accepted] = {}
    walks: dict[int, _Walk] = {}
    for b, row in rows.items():
        steps = walk(row.tokens, row.parents)
        walks[b] = _Walk(row=row, steps=steps, node=next(steps), penalized=_penalized(row))
    while walks:
        logits = step.host_logits([Node(b, going.node) for b, going in walks.items()])
        for (b, going), scores in zip(list(walks.items()), logits, strict=True):
            ended = going.go_on(_choose(going, scores))
            if ended is not None:
                accepted[b] = ended
                del walks[b]
    return accepted


def _choose(walk: _Walk, logits: NDArray[np.float32]) -> int:
    """The target's token after the node at which a walk stands, given the logits there."""
    row = walk.row
    mask = row.mask(walk.node)
    return choose(
        logits,
        row.sampling,
        position=len(row.log) + len(walk.path),
        context=walk.penalized,
        allowed=None if mask is None else unpacked(mask, len(logits)),
        answer=[*row.log[row.start :], *walk.path] if row.sampling.counts else [],
    )


def _penalized(row: Judged) -> NDArray[np.int64]:
    """The distinct tokens of a log; none where no penalty asks for them."""
    if row.sampling.repetition_penalty == 1.0:
        return np.zeros(0, dtype=np.int64)
    return np.unique(np.asarray(row.log, dtype=np.int64))


def log_probabilities(
    step: Step, b: int, path: Sequence[int], chosen: Sequence[int], top: int
) -> bytes:
    """The log-probabilities that the target gave the tokens which it chose after the nodes of a
    `path` in row b of a forward, and those of the `top` likeliest tokens there, as bytes in the
    layout of `moa.logprobs`."""
    logprobs = _log_softmax(step.host_logits([Node(b, node) for node in path]))
    chosen_ids = np.asarray(chosen, dtype=np.int64)[:, None]
    own = np.take_along_axis(logprobs, chosen_ids, axis=1)[:, 0]
    likeliest = _likeliest(logprobs, min(top, logprobs.shape[1]))
    return pack(own, likeliest, np.take_along_axis(logprobs, likeliest, axis=1))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of each row of logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)  # so that no exponential overflows
    # Sums of float32 over a whole vocabulary lose digits; of float64 they do not.
    mass = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    logprobs: NDArray[np.float32] = (shifted - np.log(mass)).astype(np.float32)
    return logprobs


def _likeliest(logprobs: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The tokens with the `count` largest log-probabilities of each row, `[rows, count]`, the
    likeliest first; of equally likely ones the smallest ids."""
    if count == 0:
        return np.zeros((len(logprobs), 0), dtype=np.int64)
    smallest_kept = np.partition(logprobs, -count, axis=1)[:, -count]
    likeliest = np.empty((len(logprobs), count), dtype=np.int64)
    for index, row in enumerate(logprobs):
        ids = np.flatnonzero(row >= smallest_kept[index])  # more than `count` where some are equal
        best_first = np.argsort(-row[ids], kind="stable")  # stable: equal ones stay by id
        likeliest[index] = ids[best_first][:count]
    return likeliest
