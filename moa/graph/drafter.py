"""The drafter as a graph: a KV cache that follows the given ids, and trees drafted after them.

The caller always passes all ids so far, and the cached part is found by comparison. Rolling back
after a verdict and keeping accepted nodes follow from one rule: keep the longest common prefix,
first of the committed rows, then along the nodes of the latest tree.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moa.grammar.matcher import Bits, TextMask, has, unpacked
from moa.graph.cache import KVBuffer, RecordBuffer
from moa.graph.step import Call, Float, Heads, StepGraph
from moa.sampling import SamplingSettings, adjust, gumbel
from moa.speculation.guess_tree import GuessTreeGrower
from moa.tree import FORBIDDEN, MASKED, DraftTree, TreeGrower, TreeShape, additive

Steps = Generator[None, None, DraftTree]
"""Yields between two runs of the graph, so that the caller can do other work or stop; returns the
tree."""
_NO_RECORDS: dict[str, Float] = {}
_CHUNK = 128
"""Prompt tokens fed in one run: bounds the time between two yields."""
_KEPT = 16
"""Bound calls are kept for up to so many tokens; longer prompt pieces have any length."""
R = TypeVar("R")


def run(steps: Generator[None, None, R]) -> R:
    """Run all steps, for callers without other work."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: R = end.value
            return result


class OnnxDrafter:
    """Drafts over the exported step graph."""

    def __init__(
        self,
        graph: StepGraph,
        *,
        draft_tokens: NDArray[np.int64] | None = None,
        vocab_size: int,
        borrowed: int = 0,
    ) -> None:
        """`draft_tokens` are the target ids of a reduced draft vocabulary; records carry rows of
        the last `borrowed` layers with a cache."""
        self.graph = graph
        theirs = graph.cache[graph.layers - borrowed :]
        heads = graph.records or (Heads(0, theirs[0].width) if borrowed else None)
        self.records = RecordBuffer(heads, theirs) if heads else None
        self.ids: list[int] = []
        """Tokens whose rows are committed: row r is position r."""
        self.answer_at = 0
        """Where the answer begins, whose tokens penalties count."""
        self._borrows = borrowed > 0
        self._rows = KVBuffer(graph.cache)
        self._nodes: dict[tuple[int, int], int] = {}
        """(parent's row, token) -> row, for rows after the committed ones; -1 is the last committed
        row."""
        self._vocab_size = vocab_size
        self._noise_ids = vocab_size if draft_tokens is None else draft_tokens
        self.run_tokens = 1
        """Tokens that the latest run was over."""
        self.run_seconds, self.runs = 0.0, 0
        """Time spent so far in ONNX Runtime, and how often it was called."""
        self._growth: GuessTreeGrower | None = None
        """The tree that `grow` extends, whose root follows the committed rows; and the rows of its
        nodes."""
        self._grown_rows: dict[int, int] = {}
        self._drafts = 0
        """Version of the committed rows, for which a call's mask is made."""
        self._silence = np.zeros((1, 1, 1), np.float32)
        self._noise: dict[tuple[int, int], Float] = {}
        self._calls: dict[tuple[int, bool], Call] = {}
        """By tokens at a time, and whether they are a text or a tree's level."""

    def draft(
        self,
        ids: Sequence[int],
        shape: TreeShape,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Steps:
        """A tree of guesses after `ids`, whose last is the tree's root; under a grammar, of what
        may follow."""
        call = yield from self._follow(ids, sampling, grammar)
        grower = TreeGrower(ids[-1], shape)
        first = len(self.ids)
        base = len(ids) - 1
        sees = additive(np.eye(1 + shape.breadth * (shape.depth - 1), dtype=np.bool_))
        """Mask between fed nodes, in the order of their rows: each sees its ancestors and itself."""
        place = {0: 0}
        """Fed node -> its index in that order."""
        while True:
            grower.expand(call.top_tokens[0], call.top_logp[0])
            if not (nodes := grower.frontier):
                return grower.tree()
            yield
            tokens = grower.frontier_tokens
            fed = len(grower.fed)
            stop = fed + len(nodes)
            above = [place[grower.parents[node]] for node in nodes]
            for at, (node, token, parent) in enumerate(zip(nodes, tokens, above, strict=True), fed):
                place[node] = at
                self._nodes[first + parent, token] = first + at
            call = self._call(tokens, first + fed)
            call.positions.fill(base + grower.level)
            call.feature_rows[:] = [first + parent for parent in above]
            sees[fed:stop, :fed] = sees[above, :fed]
            call.mask[0, 0, :, first : first + fed] = sees[fed:stop, :fed]
            masks = (
                [grammar.guesses(grower.path(node)) for node in nodes]
                if grammar is not None
                else []
            )
            paths = [grower.path(node) for node in nodes] if sampling.adjusts else []
            self._run(call, first + fed, sampling, masks, self._adjustments(ids, paths, sampling))

    def grow(
        self,
        ids: Sequence[int],
        breadth: int,
        least: float,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Generator[None, None, GuessTreeGrower]:
        """Add to the tree of guesses after `ids`: run its `breadth` likeliest open nodes, and keep
        of what may follow each the best, and others that are likelier than `least` in all. The tree
        is kept, and what is below the new end of `ids` stays."""
        growth = self._grown_after(ids)
        if growth is None:
            call = yield from self._follow(ids, sampling, grammar)
            growth = self._growth = GuessTreeGrower(ids[-1])
            self._grown_rows = {0: len(self.ids)}
            self._expand(growth, [0], call, breadth, least)
            return growth
        rows = self._grown_rows
        if not (nodes := growth.best(breadth)):
            return growth
        parents = growth.tree.parents
        first = max(rows.values(), default=len(self.ids) - 1) + 1
        committed = len(self.ids)
        call = self._call([growth.tree.tokens[node] for node in nodes], first)
        call.mask[..., committed:] = MASKED  # the call may have been used for other nodes
        for at, node in enumerate(nodes):
            call.positions[0, at] = committed + growth.depths[node]
            call.feature_rows[at] = rows[parents[node]] if node else committed - 1
            call.mask[0, 0, at, at - len(nodes)] = 0
            while (node := parents[node]) >= 0:
                call.mask[0, 0, at, rows[node]] = 0
        masks = (
            [grammar.guesses(growth.path(node)) for node in nodes] if grammar is not None else []
        )
        paths = [growth.path(node) for node in nodes] if sampling.adjusts else []
        self._run(call, first, sampling, masks, self._adjustments(ids, paths, sampling))
        for at, node in enumerate(nodes):
            rows[node] = first + at
            above = rows[parents[node]] if node else -1
            self._nodes[above, growth.tree.tokens[node]] = first + at
        growth = self._growth = (
            growth.copy()
        )  # the event loop may read the earlier one: this can be a thread's step
        self._expand(growth, nodes, call, breadth, least)
        return growth

    def read(self, ids: Sequence[int]) -> Generator[None, None, None]:
        """Compute and keep the rows of `ids`, after which nobody wants a guess yet."""
        if self._keep(ids) < len(ids):
            yield from self._follow(ids, SamplingSettings())

    def _expand(
        self, growth: GuessTreeGrower, nodes: Sequence[int], call: Call, breadth: int, least: float
    ) -> None:
        """Add the guesses of a call after these nodes to the tree, as many as are likely enough."""
        tokens = call.top_tokens[0, :, :breadth].tolist()
        logp = call.top_logp[0, :, :breadth].tolist()
        scores = [[score if math.isfinite(score) else MASKED for score in row] for row in logp]
        for at, node in enumerate(nodes):
            kept = sum(growth.tree.scores[node] + score >= least for score in scores[at])
            kept = min(max(1, kept), sum(score > FORBIDDEN for score in scores[at]))
            tokens[at], scores[at] = tokens[at][:kept], scores[at][:kept]
        growth.expand(nodes, tokens, scores)

    def _grown_after(self, ids: Sequence[int]) -> GuessTreeGrower | None:
        """The earlier tree, if `ids` end in it: nodes on the path are committed, others are
        dropped."""
        growth = self._growth
        rows = self._grown_rows
        before = len(self.ids)
        if (
            growth is None
            or len(ids) <= before
            or self.ids != ids[:before]
            or growth.root != ids[before]
        ):
            return None
        path = growth.find(ids[before + 1 :])
        if path is None or any(node not in rows for node in [0, *path][:-1]):
            return None
        if not path:
            return growth
        passed = [0, *path][:-1]
        growth, were = growth.below(path[-1])
        self._growth = growth
        kept = [node for node in were if node in rows]
        self._rows.gather([rows[node] for node in (*passed, *kept)], before)
        self._made(before, before + len(passed))
        self.ids = list(ids[:-1])
        if self.records is not None:
            self.records.lend(self._rows.arrays, len(self.ids))
        self._drafts += 1
        at = {node: row for row, node in enumerate(kept, len(self.ids))}
        self._grown_rows = rows = {new: at[old] for new, old in enumerate(were) if old in at}
        tree = growth.tree
        self._nodes = {
            (rows.get(tree.parents[n], -1), tree.tokens[n]): row for n, row in rows.items()
        }
        return growth

    def guess(
        self, ids: Sequence[int], sampling: SamplingSettings, grammar: TextMask | None = None
    ) -> Generator[None, None, int]:
        """The most likely token after `ids`."""
        call = yield from self._follow(ids, sampling, grammar)
        token = int(call.top_tokens[0, 0, 0])
        if grammar is not None and not has(bits := grammar.allowed(), token):  # it has no draft id
            token = int(np.flatnonzero(unpacked(bits, self._vocab_size))[0])
        return token

    def end_steps(self) -> None:
        """End the step that runs in another thread: it fails, and the caches are worth nothing."""
        self.graph.end_steps()

    def _follow(
        self, ids: Sequence[int], sampling: SamplingSettings, grammar: TextMask | None = None
    ) -> Generator[None, None, Call]:
        """Run the ids that are not cached, piece by piece; returns the call whose guesses follow
        the last.

        All but the last are committed: the last is the root of the draft.
        """
        known = self._keep(ids[:-1])
        while True:
            if self.records is not None:
                self.records.lend(self._rows.arrays, len(self.ids))
            self._drafts += 1
            stop = min(known + _CHUNK, len(ids))
            if self._borrows and known < stop - 1:
                stop = min(
                    stop, len(ids) - 1
                )  # the root attends to the target's rows of the others
            piece = list(ids[known:stop])
            call = self._call(piece, known, text=True)
            call.positions[0] = np.arange(known, stop)
            masks = [grammar.guesses()] if grammar is not None and stop == len(ids) else []
            call.feature_rows[:] = -1
            call.feature_rows[0] = known - 1
            ends = stop == len(ids) and sampling.adjusts
            changes = self._adjustments(ids, [()] if ends else [], sampling)
            self._run(call, known, sampling, masks, changes)
            if (
                self.graph.features and len(piece) > 1
            ):  # again, with what each token has made for the next one
                call.feature_rows[1:] = np.arange(known, stop - 1)
                self._run(call, known, sampling, masks, changes)
            self._made(known, known + len(piece))
            known += len(piece)
            self.ids += piece
            if known == len(ids):
                break
            yield
        root = self.ids.pop()
        self._drafts += 1
        self._nodes[-1, root] = len(self.ids)
        return call

    def _keep(self, ids: Sequence[int]) -> int:
        """Cut the committed rows to the common prefix with `ids`, and append the tree's rows that
        continue it."""
        ids = list(ids)
        same = len(self.ids)
        if self.ids != ids[:same]:
            pairs = enumerate(zip(self.ids, ids, strict=False))
            same = next(
                (i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.ids), len(ids))
            )
            self._nodes.clear()
        path: list[int] = []
        row = -1
        while (
            same + len(path) < len(ids)
            and (row := self._nodes.get((row, ids[same + len(path)]), -2)) >= 0
        ):
            path.append(row)
        self._growth = None  # its rows are overwritten
        self._rows.gather(path, same)
        self._made(same, same + len(path))
        self._nodes.clear()
        self.ids = ids[: same + len(path)]
        return len(self.ids)

    def _made(self, start: int, stop: int) -> None:
        if self.records is not None:
            self.records.made(start, stop)

    def _call(self, tokens: Sequence[int], at: int, *, text: bool = False) -> Call:
        """A call whose rows start at `at`; its mask shows only the committed rows. Of a `text`,
        guesses are wanted after its last token, else after each."""
        self._rows.reserve(at + len(tokens))
        records = self.records.feeds() if self.records is not None else _NO_RECORDS
        key = len(tokens), text and len(tokens) > 1
        call = self._calls.get(key)
        if call is None or call.cache is not self._rows.arrays or call.records is not records:
            call = Call(
                self.graph, len(tokens), cache=self._rows.arrays, records=records, text=text
            )
            if len(tokens) <= _KEPT:
                self._calls[key] = call
        call.ids[0] = tokens
        if call.masked_for != self._drafts:  # within a draft the mask only grows
            call.masked_for = self._drafts
            call.mask[..., len(self.ids) : -len(tokens)] = MASKED
            call.mask[..., : len(self.ids)] = 0
        return call

    def _run(
        self,
        call: Call,
        at: int,
        sampling: SamplingSettings,
        masks: Sequence[Bits | None] = (),
        changes: Float | None = None,
    ) -> None:
        """Run a call, and store its rows; `masks` are of the tokens that may follow each of its
        queries, and `changes` what is added to their logits."""
        self.run_tokens = call.ids.shape[1]
        self.runs += 1
        if sampling.greedy:
            call.scale[0] = 1.0
            noise = self._silence
        else:
            call.scale[0] = 1.0 / sampling.temperature
            noise = self._noise_after(sampling.seed, call)
        if changes is not None:
            noise = noise + changes * call.scale[0]
        if masks:
            noise = noise + self._masked(masks)
        self.run_seconds += call.run(noise)
        # A NaN row breaks all later ones, though masked.
        if not all(map(math.isfinite, call.top_logp[0, :, 0].tolist())):
            for rows in call.rows.arrays:
                np.nan_to_num(rows, copy=False, posinf=0, neginf=0)
        self._rows.write(at, call.rows)

    def _noise_after(self, seed: int, call: Call) -> Float:
        """The noise of what follows the tokens asked about: of one position, or of each its own."""
        positions = call.positions[0, -call.top_logp.shape[1] :].tolist()
        if min(positions) == max(positions):
            return self._noise_at(seed, positions[-1] + 1)
        return np.concatenate(
            [self._noise_at(seed, position + 1) for position in positions], axis=1
        )

    def _adjustments(
        self, ids: Sequence[int], paths: Sequence[Sequence[int]], sampling: SamplingSettings
    ) -> Float | None:
        """What penalties and biases add to the logits after each of these paths behind `ids`."""
        if not paths:
            return None
        none = np.zeros(self._vocab_size)
        changes = np.stack(
            [adjust(none, sampling, [*ids[self.answer_at :], *path]) for path in paths]
        )
        wanted = self._noise_ids
        mine = changes if isinstance(wanted, int) else changes[:, wanted]
        return mine.astype(np.float32)[None]

    def _masked(self, masks: Sequence[Bits | None]) -> Float:
        """What is added to logits to forbid tokens."""
        flags = [np.True_ if bits is None else unpacked(bits, self._vocab_size) for bits in masks]
        allowed = np.stack(np.broadcast_arrays(*flags, np.ones(self._vocab_size, np.bool_))[:-1])
        ids = self._noise_ids
        return additive(allowed if isinstance(ids, int) else allowed[:, ids])[None]

    def _noise_at(self, seed: int, position: int) -> Float:
        """The sampling noise of `position`; cached, because a position is drafted several times."""
        if (seed, position) not in self._noise:
            if len(self._noise) > 64:
                self._noise.clear()
            noise = gumbel(seed, position, self._noise_ids).astype(np.float32)
            self._noise[seed, position] = noise[None, None]
        return self._noise[seed, position]
