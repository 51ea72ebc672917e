"""The drafter as a graph: a KV cache that follows the given ids, and trees drafted after them.

The caller always passes all ids so far, and the cached part is found by comparison. Rolling back
after a verdict and keeping accepted nodes follow from one rule: keep the longest common prefix,
first of the committed rows, then along the nodes of the latest tree.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moa.grammar.matcher import Bits, TextMask, has, unpacked
from moa.graph.cache import KVBuffer, RecordBuffer
from moa.graph.states import StateHistory
from moa.graph.step import Call, Float, Heads, StepGraph
from moa.process.memory import give_back_free_memory
from moa.sampling import SamplingSettings, adjust, gumbel
from moa.speculation.guess_tree import GuessTreeGrower
from moa.text_stream import common_prefix
from moa.tree import FORBIDDEN, MASKED, DraftTree, TreeGrower, TreeShape, additive

Steps = Generator[None, None, DraftTree]
"""Yields between two runs of the graph, so that the caller can do other work or stop; returns the
tree."""
_NO_RECORDS: dict[str, Float] = {}
LONGEST_PIECE = 64
"""Prompt tokens fed in one run: bounds the time between two yields, and the memory of attention,
which is so many times as much as for one token. Longer pieces are not faster."""
_MOST_KEPT_TOKENS = 16
"""Bound calls of up to so many tokens are kept; longer pieces of prompts have any length."""
_MOST_KEPT_NOISE = 64
"""Positions whose sampling noise is kept at most."""
_MOST_NOISE_BYTES = 2**24
"""Bytes of it: 27 positions of 152,000 words. A chain of guesses is shorter."""
_LAST_COMMITTED = -1
"""As the row of a parent: the last committed row, whichever it is now."""
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
        """Draft with this graph, with caches of its own. `draft_tokens` are the target's ids of the
        tokens that the drafter knows, None if it knows all; `vocab_size` is the target's.
        Activation records bring rows of the last `borrowed` layers of the cache."""
        self.graph = graph
        borrowed_heads = graph.cache[graph.layers - borrowed :]
        own_heads = graph.records
        if own_heads is None and borrowed:
            own_heads = Heads(0, borrowed_heads[0].width)  # records of borrowed layers only
        self.records = None if own_heads is None else RecordBuffer(own_heads, borrowed_heads)
        self._borrows = borrowed > 0

        self.ids: list[int] = []
        """Tokens whose rows are committed: row r is position r."""
        self.answer_at = 0
        """Where the answer begins, whose tokens penalties count."""
        self._states = StateHistory(graph.states) if graph.states else None
        """Running states; with them drafts are chains."""
        self._rows = KVBuffer(graph.cache)
        """The cache: the committed rows, then those of the latest tree."""
        self._tree_rows: dict[tuple[int, int], int] = {}
        """(parent's row, token) -> row, for the rows after the committed ones. A parent may be
        `_LAST_COMMITTED`."""
        self._version = 0
        """Of the committed rows. A call's mask shows those of one version."""
        self._growth: GuessTreeGrower | None = None
        """The tree that `grow` extends, whose root follows the committed rows."""
        self._growth_rows: dict[int, int] = {}
        """The cache row of each of its nodes that the graph has run."""

        self._vocab_size = vocab_size
        self._draft_tokens = draft_tokens
        self._noise = _Noise(vocab_size if draft_tokens is None else draft_tokens)
        self._calls: dict[tuple[int, bool], Call] = {}
        """By tokens at a time, and whether they are a text or a tree's level."""

        self.run_tokens = 1
        """Tokens that the latest run was over."""
        self.run_seconds = 0.0
        """Time spent so far in ONNX Runtime."""
        self.runs = 0
        """How often ONNX Runtime was called."""

    def draft(
        self,
        ids: Sequence[int],
        shape: TreeShape,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Steps:
        """Draft a tree of guesses after `ids`, whose last token is the tree's root; under a grammar
        only of tokens that may follow. The graph runs one level of the tree at a time."""
        if self._states is not None:
            # Running states belong to one sequence, so that a draft cannot branch.
            shape = replace(shape, breadth=1)
        call = yield from self._follow(ids, sampling, grammar)
        grower = TreeGrower(ids[-1], shape)
        rows = _DraftRows(len(self.ids), shape)
        root_position = len(ids) - 1
        while True:
            grower.expand(call.top_tokens[0], call.top_logp[0])
            if not grower.frontier:
                return grower.tree()
            yield
            level = rows.add_level(grower)
            self._note_tree_rows(level.first_row, level.parent_rows, level.tokens)
            del call  # as in `_follow`
            call = self._call(level.tokens, level.first_row)
            call.positions.fill(root_position + grower.level)  # siblings share a position
            call.feature_rows[:] = level.parent_rows
            call.mask[0, 0, :, rows.root : level.first_row] = level.mask
            paths = [grower.path(node) for node in grower.frontier]
            self._run_after(call, level.first_row, ids, paths, sampling, grammar)

    def grow(
        self,
        ids: Sequence[int],
        breadth: int,
        least: float,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Generator[None, None, GuessTreeGrower]:
        """Let the tree of guesses after `ids` grow by one run of the graph, and return it.

        The run is over the `breadth` likeliest nodes that have no children yet. Each gets the best
        guess that may follow it, and the others whose whole path has at least the log-probability
        `least`. The tree is kept for the next call: if `ids` have gone on along it by then, what is
        below their new end stays.
        """
        if self._states is not None:
            breadth = 1  # running states belong to one sequence, so that a draft cannot branch
        growth = self._growth_after(ids)
        if growth is None:
            call = yield from self._follow(ids, sampling, grammar)
            growth = GuessTreeGrower(ids[-1])
            self._growth = growth
            self._growth_rows = {0: len(self.ids)}
            self._expand(growth, [0], call, breadth, least)
            return growth
        nodes = growth.best(breadth)
        if not nodes:
            return growth
        first_row = max(self._growth_rows.values(), default=len(self.ids) - 1) + 1
        call = self._call_over_nodes(growth, nodes, first_row)
        paths = [growth.path(node) for node in nodes]
        self._run_after(call, first_row, ids, paths, sampling, grammar)
        self._note_growth_rows(growth, nodes, first_row)
        # A copy, for this may run in a thread while the event loop reads the earlier tree.
        growth = growth.copy()
        self._growth = growth
        self._expand(growth, nodes, call, breadth, least)
        return growth

    def _call_over_nodes(
        self, growth: GuessTreeGrower, nodes: Sequence[int], first_row: int
    ) -> Call:
        """Prepare a call over some nodes of the tree that `grow` extends, whose rows start at
        `first_row`. The nodes may lie anywhere in the tree, so each has a position and a mask of
        its own: it sees the text, its ancestors, and itself."""
        tree = growth.tree
        rows = self._growth_rows
        committed = len(self.ids)
        call = self._call([tree.tokens[node] for node in nodes], first_row)
        call.mask[..., committed:] = MASKED  # the call may have been used for other nodes
        for query, node in enumerate(nodes):
            parent = tree.parents[node]
            call.positions[0, query] = committed + growth.depths[node]
            call.feature_rows[query] = rows[parent] if parent >= 0 else committed - 1
            mask = call.mask[0, 0, query]
            mask[query - len(nodes)] = 0  # itself: the last columns are these nodes
            ancestor = parent
            while ancestor >= 0:
                mask[rows[ancestor]] = 0
                ancestor = tree.parents[ancestor]
        return call

    def _note_growth_rows(
        self, growth: GuessTreeGrower, nodes: Sequence[int], first_row: int
    ) -> None:
        """Note that the rows from `first_row` on are those of these nodes of the tree that `grow`
        extends. Parents are noted before their children."""
        tree = growth.tree
        for row, node in enumerate(nodes, first_row):
            self._growth_rows[node] = row
            parent_row = self._growth_rows.get(tree.parents[node], _LAST_COMMITTED)
            self._tree_rows[parent_row, tree.tokens[node]] = row

    def _note_tree_rows(
        self, first_row: int, parent_rows: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Note that the rows from `first_row` on are those of these tokens of the latest tree."""
        for row, key in enumerate(zip(parent_rows, tokens, strict=True), first_row):
            self._tree_rows[key] = row

    def read(self, ids: Sequence[int]) -> Generator[None, None, None]:
        """Compute the keys and values of `ids` where they are not cached, and keep them; nobody
        wants a guess after them yet."""
        if self._keep(ids) < len(ids):
            yield from self._follow(ids, SamplingSettings())

    def _expand(
        self, growth: GuessTreeGrower, nodes: Sequence[int], call: Call, breadth: int, least: float
    ) -> None:
        """Add a call's guesses after these nodes to the tree, as many after each as
        `_count_of_kept` says."""
        all_tokens = call.top_tokens[0, :, :breadth].tolist()
        all_scores = call.top_logp[0, :, :breadth].tolist()
        kept_tokens = []
        kept_scores = []
        for node, tokens, scores in zip(nodes, all_tokens, all_scores, strict=True):
            # A score that is no number counts as that of a token which is masked.
            scores = [score if math.isfinite(score) else MASKED for score in scores]
            count = _count_of_kept(scores, growth.tree.scores[node], least)
            kept_tokens.append(tokens[:count])
            kept_scores.append(scores[:count])
        growth.expand(nodes, kept_tokens, kept_scores)

    def _growth_after(self, ids: Sequence[int]) -> GuessTreeGrower | None:
        """The tree that earlier calls of `grow` made, moved to the end of `ids`, if `ids` have gone
        on along it: the nodes that they have passed join the cached text, and nodes that are not
        below the new end are dropped. None if `ids` have left the tree."""
        growth = self._growth
        committed = len(self.ids)
        if growth is None or len(ids) <= committed or self.ids != ids[:committed]:
            return None
        if ids[committed] != growth.root:
            return None
        path = growth.find(ids[committed + 1 :])
        if path is None:
            return None
        if not path:
            return growth
        # The last token of `ids` becomes the root, whose row is not committed yet.
        *passed, new_root = [0, *path]
        if any(node not in self._growth_rows for node in passed):
            return None  # the graph has not run it: there is no row to commit
        self._move_growth(growth, passed, new_root)
        self.ids = list(ids[:-1])
        if self.records is not None:
            self.records.lend(self._rows.arrays, len(self.ids))
        self._version += 1
        return self._growth

    def _move_growth(self, growth: GuessTreeGrower, passed: Sequence[int], new_root: int) -> None:
        """Move a tree along the text: the cache rows of the nodes that the text has `passed` join
        those of the text, and of the tree stays what is below `new_root`, with its rows behind
        them."""
        text_start = len(self.ids)
        text_stop = text_start + len(passed)
        old_rows = self._growth_rows
        subtree, old_nodes = growth.below(new_root)
        # Nodes that the graph has not run have no rows.
        run_nodes = [node for node, old_node in enumerate(old_nodes) if old_node in old_rows]
        passed_rows = [old_rows[node] for node in passed]
        kept_rows = [old_rows[old_nodes[node]] for node in run_nodes]
        self._rows.gather(passed_rows + kept_rows, text_start)
        self._note_own_rows(text_start, text_stop)
        self._growth = subtree
        self._growth_rows = {}
        self._tree_rows = {}
        self._note_growth_rows(subtree, run_nodes, text_stop)

    def guess(
        self, ids: Sequence[int], sampling: SamplingSettings, grammar: TextMask | None = None
    ) -> Generator[None, None, int]:
        """The most likely token after `ids`; under a grammar, of those that may follow."""
        call = yield from self._follow(ids, sampling, grammar)
        token = int(call.top_tokens[0, 0, 0])
        if grammar is None:
            return token
        allowed = grammar.allowed()
        if has(allowed, token):
            return token
        # No allowed token is in the drafter's own vocabulary: any other of them will do.
        return int(np.flatnonzero(unpacked(allowed, self._vocab_size))[0])

    def end_steps(self) -> None:
        """End the step that runs in another thread: it fails, and the caches are worth nothing."""
        self.graph.end_steps()

    def _follow(
        self, ids: Sequence[int], sampling: SamplingSettings, grammar: TextMask | None = None
    ) -> Generator[None, None, Call]:
        """Run the drafter's graph over the ids whose rows (keys and values) are not cached yet,
        piece by piece, so that the caller can do other work between two pieces. Returns the last
        call, whose guesses follow the last id.

        All ids but the last join the cached text. The last is the root of the draft, and its row is
        kept as one of the draft's.
        """
        start = self._keep(ids[:-1])
        is_long = len(ids) - start > LONGEST_PIECE
        while True:
            stop = self._end_of_piece(start, len(ids))
            self.graph.gives_back = is_long and stop == len(ids)
            call = self._run_piece(ids, start, stop, sampling, grammar)
            if stop == len(ids):
                break
            start = stop
            del call  # it is bound to the cache, which may grow next
            yield
        root = self.ids.pop()
        self._version += 1
        self._tree_rows[_LAST_COMMITTED, root] = len(self.ids)
        return call

    def _end_of_piece(self, start: int, end: int) -> int:
        """Returns where the piece ends that is run next, of a text whose tokens from `start` to
        `end` are not cached yet."""
        stop = min(start + LONGEST_PIECE, end)
        if self._borrows and start < stop - 1:
            # The root runs alone, after the next `lend`: it attends to the target's rows of the
            # tokens before it.
            return min(stop, end - 1)
        return stop

    def _run_piece(
        self,
        ids: Sequence[int],
        start: int,
        stop: int,
        sampling: SamplingSettings,
        grammar: TextMask | None,
    ) -> Call:
        """Run the graph over the tokens `start` to `stop` of `ids`, behind those that are cached,
        and let them join the cached text. Returns the call, which has guesses after its last
        token."""
        if self.records is not None:
            # Rows that the target has made replace the drafter's own in borrowed layers.
            self.records.lend(self._rows.arrays, len(self.ids))
        self._version += 1
        piece = list(ids[start:stop])
        call = self._call(piece, start, text=True)
        call.positions[0] = np.arange(start, stop)
        call.feature_rows[:] = -1
        call.feature_rows[0] = start - 1
        # Guesses matter at the end of `ids` alone, with no drafted tokens behind it: an empty path.
        paths: list[list[int]] = [[]] if stop == len(ids) else []
        masks = _masks_after(paths, grammar)
        changes = self._adjustments(ids, paths, sampling)
        self._run(call, start, sampling, masks=masks, changes=changes)
        if self.graph.features and len(piece) > 1:
            # Each token reads a feature of the token before it, which the run has only now made:
            # once more, with these.
            call.feature_rows[1:] = np.arange(start, stop - 1)
            self._run(call, start, sampling, masks=masks, changes=changes)
        self._note_own_rows(start, stop)
        self.ids += piece
        return call

    def _keep(self, ids: Sequence[int]) -> int:
        """Make the cache follow `ids` as far as it can without running the graph, and return how
        many of them it holds then. Rows behind the common prefix with the text before are given up;
        rows of the latest draft whose tokens continue it are moved behind it."""
        ids = list(ids)
        common = common_prefix(self.ids, ids)
        if common < len(self.ids):
            self._tree_rows.clear()  # the tree follows rows that are cut
        drafted_rows = self._rows_along_tree(ids[common:])
        self._growth = None  # its rows are overwritten
        self._rows.gather(drafted_rows, common)
        kept = common + len(drafted_rows)
        self._note_own_rows(common, kept)
        self._tree_rows.clear()
        if self._states is not None:
            kept = self._states.latest(kept)
        self.ids = ids[:kept]
        return kept

    def _rows_along_tree(self, tokens: Sequence[int]) -> list[int]:
        """Returns the rows that the latest tree has of these tokens after the committed text, as
        far as it has them."""
        rows: list[int] = []
        row = _LAST_COMMITTED
        for token in tokens:
            next_row = self._tree_rows.get((row, token))
            if next_row is None:
                break
            rows.append(next_row)
            row = next_row
        return rows

    def _note_own_rows(self, start: int, stop: int) -> None:
        """Tell the records that the cache has rows of our own at these positions now."""
        if self.records is not None:
            self.records.made(start, stop)

    def _call(self, tokens: Sequence[int], first_row: int, *, text: bool = False) -> Call:
        """Prepare a call of the graph over these tokens, whose cache rows start at `first_row`. Its
        mask shows only the rows of the text; the caller adds those of a draft. Of a `text`, guesses
        are wanted after its last token, else after each."""
        last_row = first_row + len(tokens)
        if last_row > self._rows.size:
            # Calls are bound to the arrays that are outgrown, and would keep them in memory.
            self._calls.clear()
            self._rows.reserve(last_row)
            give_back_free_memory()  # the outgrown arrays: the next are too large for their places
        records = self.records.feeds() if self.records is not None else _NO_RECORDS
        key = len(tokens), text and len(tokens) > 1
        call = self._calls.get(key)
        if call is not None and call.records is not records:  # these have grown, too
            self._calls.clear()
            call = None
        if call is None:
            cache = self._rows.arrays
            call = Call(self.graph, len(tokens), cache=cache, records=records, text=text)
            if len(tokens) <= _MOST_KEPT_TOKENS:
                self._calls[key] = call
        call.ids[0] = tokens
        if self._states is not None:
            call.carry(*self._states.step(first_row, first_row + len(tokens)))
        if call.masked_for != self._version:  # within a draft the mask only grows
            call.masked_for = self._version
            call.mask[..., len(self.ids) : -len(tokens)] = MASKED
            call.mask[..., : len(self.ids)] = 0
        return call

    def _run_after(
        self,
        call: Call,
        first_row: int,
        ids: Sequence[int],
        paths: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        grammar: TextMask | None,
    ) -> None:
        """Run a call whose queries are the ends of these paths of drafted tokens behind `ids`."""
        masks = _masks_after(paths, grammar)
        changes = self._adjustments(ids, paths, sampling)
        self._run(call, first_row, sampling, masks=masks, changes=changes)

    def _run(
        self,
        call: Call,
        first_row: int,
        sampling: SamplingSettings,
        *,
        masks: Sequence[Bits | None] = (),
        changes: Float | None = None,
    ) -> None:
        """Run a call of the graph, and store the keys and values of its tokens from `first_row` on.

        Its guesses follow its queries, some or all of its tokens. `masks` say for each query which
        tokens a grammar allows, and `changes` are what penalties and biases add to its logits. All
        of that, and sampling noise, is added by the graph before it sorts the guesses. It
        multiplies its logits by `call.scale` before.
        """
        self.run_tokens = call.ids.shape[1]
        self.runs += 1
        added = self._noise.none
        call.scale[0] = 1.0
        if not sampling.greedy:
            added = self._noise.after(sampling.seed, call)
            call.scale[0] = 1.0 / sampling.temperature
        # The graph scales its logits before it adds to them, so changes are scaled here.
        if changes is not None:
            added = added + changes * call.scale[0]
        if masks:
            added = added + self._mask_of_tokens(masks)
        self.run_seconds += call.run(added)
        _replace_nan(call)
        self._rows.put(first_row, call.rows)

    def _adjustments(
        self, ids: Sequence[int], paths: Sequence[Sequence[int]], sampling: SamplingSettings
    ) -> Float | None:
        """What penalties and biases add to the logits of the token after `ids` and a path of
        drafted tokens, for each of these paths: `[1, paths, draft vocabulary]`; None if they add
        nothing."""
        if not paths or not sampling.adjusts:
            return None
        zeros = np.zeros(self._vocab_size)
        answer = ids[self.answer_at :]
        changes = np.stack([adjust(zeros, sampling, [*answer, *path]) for path in paths])
        return self._of_draft_tokens(changes).astype(np.float32)[None]

    def _mask_of_tokens(self, masks: Sequence[Bits | None]) -> Float:
        """What is added to logits to forbid tokens, `[1, masks, draft vocabulary]`. A mask of None
        allows all."""
        allowed = np.ones((len(masks), self._vocab_size), np.bool_)
        for row, bits in enumerate(masks):
            if bits is not None:
                allowed[row] = unpacked(bits, self._vocab_size)
        return additive(self._of_draft_tokens(allowed))[None]

    def _of_draft_tokens(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The columns of the tokens that the drafter knows, of rows over the target's vocabulary."""
        return rows if self._draft_tokens is None else rows[:, self._draft_tokens]


class _Noise:
    """Sampling noise of positions of a text, which makes the choice of the likeliest token a sample."""

    def __init__(self, tokens: int | NDArray[np.int64]) -> None:
        """Make noise for these tokens, or for the first so many of the target's."""
        self.none = np.zeros((1, 1, 1), np.float32)
        self._tokens = tokens
        self._kept: dict[tuple[int, int], Float] = {}
        """By seed and position; kept, because a position is drafted several times."""

    def after(self, seed: int, call: Call) -> Float:
        """The noise of the positions after a call's queries, `[1, 1, tokens]` if they share one
        position, else `[1, queries, tokens]`."""
        queries = call.top_logp.shape[1]
        positions = call.positions[0, -queries:].tolist()
        if min(positions) == max(positions):
            return self._at(seed, positions[0] + 1)
        noise = [self._at(seed, position + 1) for position in positions]
        return np.concatenate(noise, axis=1)

    def _at(self, seed: int, position: int) -> Float:
        """The noise of one position."""
        key = seed, position
        noise = self._kept.get(key)
        if noise is None:
            noise = gumbel(seed, position, self._tokens).astype(np.float32)[None, None]
            self._kept[key] = noise
            most = min(_MOST_KEPT_NOISE, _MOST_NOISE_BYTES // noise.nbytes)
            while len(self._kept) > max(1, most):
                del self._kept[next(iter(self._kept))]  # the oldest
        return noise


class _Level(NamedTuple):
    """The nodes of a level of a draft that are run next."""

    first_row: int
    """Cache row of the first node; those of the others follow."""
    tokens: list[int]
    parent_rows: list[int]
    mask: Float
    """Additive, `[nodes, earlier nodes of the draft]`: 0 for a node's ancestors."""


class _DraftRows:
    """The cache rows of a draft that grows level by level, and which of these rows each node
    sees."""

    def __init__(self, root: int, shape: TreeShape) -> None:
        """Begin with the root's row."""
        self.root = root
        """Row of the root. Those of the other nodes follow, in the order in which they are run."""
        self._row_of_node = {0: root}
        most_nodes = 1 + shape.breadth * (shape.depth - 1)
        self._mask = additive(np.eye(most_nodes, dtype=np.bool_))
        """The additive mask between nodes in the order of their rows."""

    def add_level(self, grower: TreeGrower) -> _Level:
        """Give the next rows to the nodes of the tree's frontier, which have just been found."""
        earlier = len(grower.fed)
        nodes = grower.frontier
        first_row = self.root + earlier
        parent_rows = [self._row_of_node[grower.parents[node]] for node in nodes]
        for row, node in enumerate(nodes, first_row):
            self._row_of_node[node] = row
        # A node sees what its parent sees.
        parents = [row - self.root for row in parent_rows]
        mask = self._mask[earlier : earlier + len(nodes), :earlier]
        mask[:] = self._mask[parents, :earlier]
        return _Level(first_row, grower.frontier_tokens, parent_rows, mask)


def _count_of_kept(scores: Sequence[float], path_score: float, least: float) -> int:
    """How many guesses after a node join its tree, of those with these scores, the best first: those
    that are allowed, and whose whole path has at least the score `least`; the best one in any case,
    if it is allowed."""
    likely = sum(path_score + score >= least for score in scores)
    # What a grammar forbids is in the list, too, with a score below those of all other tokens.
    allowed = sum(score > FORBIDDEN for score in scores)
    return min(max(1, likely), allowed)


def _replace_nan(call: Call) -> None:
    """Replace numbers that are not finite in the rows that a call has made: a row with NaN would
    break all later ones, even where it is masked."""
    best_logp = call.top_logp[0, :, 0].tolist()
    if all(math.isfinite(logp) for logp in best_logp):
        return
    for rows in call.rows:
        np.nan_to_num(rows, copy=False, posinf=0, neginf=0)


def _masks_after(paths: Sequence[Sequence[int]], grammar: TextMask | None) -> list[Bits | None]:
    """What a grammar allows after each of these paths; empty without a grammar."""
    if grammar is None:
        return []
    return [grammar.guesses(path) for path in paths]
