"""Acceptance of a drafter in any form, replayed on the target's recorded continuations, without the
target.

Greedy verification accepts exactly the drafts that equal the target's text, so the text is enough
to know what a round would accept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from export.runner import Float, Runner, StepInput, TorchRunner, empty_cache
from export.source import Source
from moa.drafters.contract import Drafter, RecordPair, StatesBefore
from moa.errors import UsageError
from moa.manifest import Acceptance, Agreement, Calibration, Offline, TreeUsed
from moa.target.contract import Target
from moa.target.generate import Continued, generate
from moa.target.torch_target import Committed
from moa.training.sources import DocumentReader, SourceExample, examples, string
from moa.tree import DraftTree, TreeGrower, TreeShape, accept

TREE = TreeShape(breadth=4, depth=6, nodes=24)
CHAIN = TreeShape.chain(6)
_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNK = 256


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's greedy continuation. Records `[Hc, len(ids), D]`, or none for
    independent drafters."""

    ids: list[int]
    prompt: int
    """Length of the prompt."""
    record_k: NDArray[np.float32] | None
    record_v: NDArray[np.float32] | None
    borrowed: list[NDArray[np.float32]] = field(default_factory=list)
    """Keys and values `[heads, len(ids), D]` that records carry of layers with a cache, by layer."""


def read_prompts(files: Sequence[Path]) -> list[str]:
    """Returns the prompts in these files: a `.jsonl` file has a "prompt" in each line, a text one
    prompt a line."""
    prompts: list[str] = []
    for file in files:
        if file.suffix == ".jsonl":
            for example in examples([str(file)]):
                prompts.append(string(example.fields, "prompt", example.where))
            continue
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from None
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"no prompt in {', '.join(map(str, files))}", hint="a line holds a prompt")
    return prompts


def encode_prompts(target: Target, prompts: Sequence[str]) -> list[list[int]]:
    """Ids as a chat sends them: through the chat template, if the tokenizer has one."""
    tokenizer: Any = target.tokenizer  # of the library, in every target that has one
    reader = DocumentReader(tokenizer, target.facts.vocab_size)
    return [reader.prompt(SourceExample("a prompt", {"prompt": prompt}), 0) for prompt in prompts]


def make_traces(
    target: Target, source: Source, prompts: Sequence[Sequence[int]], *, new_tokens: int = 96
) -> list[Continuation]:
    """Let the target continue each prompt greedily by up to `new_tokens` tokens, as many prompts at
    a time as it has slots. Returns the texts with the activation records of them, the target's
    hidden states as the drafter reads them."""
    room = target.cache.capacity - new_tokens - 1
    for prompt in prompts:
        if len(prompt) > room:
            raise UsageError(f"a calibration prompt has {len(prompt)} tokens, at most {room} fit")
    traces: list[Continuation] = []
    for start in range(0, len(prompts), target.cache.slots):
        some = prompts[start : start + target.cache.slots]
        records = [KeptRecords(source.module) for _ in some]

        def keep(index: int, done: Committed, records: list[KeptRecords] = records) -> None:
            records[index].add(done)

        texts = generate(target, some, new_tokens, seen=keep)
        for text, of_text in zip(texts, records, strict=True):
            traces.append(of_text.trace(text))
    return traces


class KeptRecords:
    """The activation records of one text, made while the target runs it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._pairs: list[RecordPair] = []
        """Keys and values of the records so far, piece by piece."""
        self._states = StatesBefore()

    def add(self, done: Committed) -> None:
        """Make the records of tokens that the target has run; pieces come in the text's order."""
        if self._drafter.record_layout is None:
            return
        if self._drafter.taps:
            done = self._states.of(done)
        self._pairs.append(self._drafter.records([done]))

    def pair(self) -> RecordPair:
        """Keys and values of all records so far, as they go over the wire but for its precision."""
        keys, values = zip(*self._pairs, strict=True)
        return np.concatenate(keys), np.concatenate(values)

    def trace(self, text: Continued) -> Continuation:
        """Returns the text with its activation records. A record has the keys and values of
        cross-attention, or rows that take the place of the drafter's own in layers with a cache, or
        both."""
        layout = self._drafter.record_layout
        if layout is None:
            return Continuation(text.ids, text.prompt, None, None)
        keys, values = (layout.split(half) for half in self.pair())
        # Keys, then values, of each part of a record, `[heads, tokens, width]`.
        rows = []
        for key, value in zip(keys, values, strict=True):
            rows.append(np.ascontiguousarray(key.transpose(1, 0, 2)))
            rows.append(np.ascontiguousarray(value.transpose(1, 0, 2)))
        if self._drafter.graph_spec.records is None:
            return Continuation(text.ids, text.prompt, None, None, rows)
        # Cross-attention's are the first part.
        return Continuation(text.ids, text.prompt, rows[0], rows[1], rows[2:])


@dataclass(frozen=True)
class AcceptedRounds:
    """Accepted drafts of every round."""

    accepted: list[int]
    depth: int

    @property
    def tokens_per_round(self) -> float:
        """The acceptance length as the paper counts it: accepted drafts and the target's own token."""
        if not self.accepted:
            return 0.0
        return float(np.mean(self.accepted)) + 1.0

    def by_depth(self) -> tuple[float, ...]:
        """Returns the share of rounds that accepted at least one draft token, at least two, and so
        on, up to the depth of the drafts."""
        if not self.accepted:
            return (0.0,) * self.depth
        accepted = np.array(self.accepted)
        shares = []
        for depth in range(1, self.depth + 1):
            shares.append(round(float((accepted >= depth).mean()), 4))
        return tuple(shares)


class _RunningStates(NamedTuple):
    """The running states of layers without a cache, after the first tokens of a text."""

    tokens: int
    """How many tokens of the text they have seen."""
    states: list[Float]


class Replay:
    """One continuation and the drafter's cache: it drafts after any token of the text."""

    def __init__(self, runner: Runner, trace: Continuation, held: int | None = None) -> None:
        """Begin with an empty cache, and fill it with the whole text. `held` is the number of the
        text's first tokens whose activation records are there; None: all."""
        self.runner = runner
        self.trace = trace
        self.held = len(trace.ids) if held is None else held
        self.rows: list[Float] = empty_cache(runner.spec)
        """Keys, then values, of each layer for the text's tokens so far, `[heads, tokens, width]`."""
        self._latest = _RunningStates(0, [])
        """The running states that the latest step over the text left."""
        # Cache rows depend on tokens alone, and on the records that carry some: all are made now.
        self.advance(len(trace.ids))

    def advance(self, end: int) -> None:
        """Extend the drafter's cache to the text's first `end` tokens."""
        # Without records each token of a drafter of states reads what the one before it made.
        tokens_at_once = 1 if self.runner.spec.features else _CHUNK
        while self._cached_tokens < end:
            start = self._cached_tokens
            made_rows = self._run(start, min(end, start + tokens_at_once))
            self.rows = _appended(self.rows, self._with_records(made_rows, start))

    @property
    def _cached_tokens(self) -> int:
        """How many of the text's first tokens have rows in the cache."""
        return self.rows[0].shape[1]

    def _run(self, start: int, stop: int) -> list[Float]:
        """Run the step over the text's tokens `start` to `stop - 1`, and keep the running states
        that it leaves. Returns the cache rows that it makes."""
        # A step predicts after one token at least. Nobody reads this prediction.
        last_token = stop - start - 1
        out = self.runner.step(self._text(start, stop, held=start, queries=[last_token]))
        self._latest = _RunningStates(stop, out.states)
        return out.rows

    def _with_records(self, made_rows: list[Float], start: int) -> list[Float]:
        """Returns the cache rows for the text's tokens from `start` on. Borrowed layers, the last
        ones, take the rows that the activation records carry, as far as these are there. All other
        rows are the drafter's own, `made_rows`."""
        borrowed = self.trace.borrowed
        own_count = len(made_rows) - len(borrowed)
        rows = made_rows[:own_count]
        for recorded, made in zip(borrowed, made_rows[own_count:], strict=True):
            stop = start + made.shape[1]
            known = recorded[:, start : min(stop, self.held)]
            unknown = made[:, known.shape[1] :]
            rows.append(np.concatenate([known, unknown], axis=1))
        return rows

    def draft(self, pending: int, shape: TreeShape) -> int:
        """Draft a tree of this shape after the text's token at position `pending`; returns how many
        of its tokens the target would accept, which are those that agree with the text."""
        self.advance(pending)
        tree = self._tree(pending, shape)
        depths = tree.depths()
        # After the text's end nothing counts as accepted: no token is -1.
        following = self.trace.ids[pending + 1 :] + [-1] * (shape.depth + 1)
        accepted = accept(tree.tokens, tree.parents, lambda node: following[int(depths[node])])
        return len(accepted.path) - 1  # without the pending token

    def _tree(self, pending: int, shape: TreeShape) -> DraftTree:
        """Returns a draft of this shape after the text's token at position `pending`: a tree that
        grows level by level, as on the device."""
        grower = TreeGrower(self.trace.ids[pending], shape)
        # The cache row of each node, which its children read: the pending token's parent is the
        # text's token before it.
        row_of_node = {-1: pending - 1}
        states = self._states_at(pending)
        cache = [rows[:, :pending] for rows in self.rows]
        while grower.frontier:  # the nodes of the latest level that are to be expanded
            parent_rows = [row_of_node[grower.parents[node]] for node in grower.frontier]
            for row, node in enumerate(grower.frontier, cache[0].shape[1]):
                row_of_node[node] = row
            step = self._level(grower, pending, cache, parent_rows, states)
            out = self.runner.step(step)
            states = out.states
            cache = _appended(cache, out.rows)
            grower.expand(out.top_tokens, out.top_logp)
        return grower.tree()

    def _level(
        self,
        grower: TreeGrower,
        pending: int,
        cache: list[Float],
        parent_rows: list[int],
        states: list[Float],
    ) -> StepInput:
        """Returns the step over the latest level of a tree behind the text's token at position
        `pending`. `parent_rows` are the cache rows of its nodes' parents."""
        tree_mask = grower.mask()
        size = len(tree_mask)
        sees_text = np.ones((size, pending), np.bool_)
        record_k, record_v = self._records(pending)
        return StepInput(
            ids=grower.frontier_tokens,
            queries=range(size),
            positions=[pending + grower.level] * size,
            mask=np.concatenate([sees_text, tree_mask], axis=1),
            past=cache,
            record_k=record_k,
            record_v=record_v,
            feature_rows=parent_rows,
            states=states,
        )

    def rounds(self, shape: TreeShape) -> list[int]:
        """Decode the text as a device would, from the prompt to its end: draft, take the accepted
        tokens and one of the target's, and draft again. Returns how many draft tokens each round
        accepted."""
        rounds: list[int] = []
        pending = self.trace.prompt
        while pending < len(self.trace.ids) - 1:
            accepted = self.draft(pending, shape)
            rounds.append(accepted)
            pending += accepted + 1  # the target's own token comes behind the accepted ones
        return rounds

    def guesses(self, start: int, end: int, held: int) -> NDArray[np.int64]:
        """The drafter's first guess after each of the text's tokens `start` to `end - 1`, with the
        records of the text's first `held` tokens."""
        return self.runner.step(self.along(start, end, held=held)).top_tokens[:, 0]

    def along(self, start: int, end: int, *, held: int) -> StepInput:
        """The step over the text's tokens `start` to `end - 1`, with guesses after each of them and
        the records of the text's first `held` tokens."""
        self.advance(start)
        return self._text(start, end, held, range(end - start))

    def _text(self, start: int, end: int, held: int, queries: Sequence[int]) -> StepInput:
        """Returns the step over the text's tokens `start` to `end - 1`, behind the cache of those
        before, with the records of the first `held` tokens. Only the `queries`, indices into these
        tokens, get a prediction."""
        count = end - start
        record_k, record_v = self._records(held)
        return StepInput(
            ids=self.trace.ids[start:end],
            queries=queries,
            positions=range(start, end),
            mask=np.tril(np.ones((count, end), np.bool_), start),
            past=[rows[:, :start] for rows in self.rows],
            record_k=record_k,
            record_v=record_v,
            # Only the first token's predecessor has a row in the cache.
            feature_rows=[start - 1] + [-1] * (count - 1),
            states=self._states_at(start),
        )

    def _states_at(self, length: int) -> list[Float]:
        """Returns the running states of layers without a cache after the text's first `length`
        tokens. Only the latest are kept: later ones are computed from there, earlier ones from the
        beginning."""
        if not self.runner.spec.states:
            return []
        if self._latest.tokens > length:
            self._latest = _RunningStates(0, [])
        while self._latest.tokens < length:
            start = self._latest.tokens
            self._run(start, min(length, start + _CHUNK))
        return self._latest.states

    def _records(self, held: int) -> tuple[Float | None, Float | None]:
        """Keys and values of the records of the text's first `held` tokens; None without records."""
        if self.trace.record_k is None or self.trace.record_v is None:
            return None, None
        return self.trace.record_k[:, :held], self.trace.record_v[:, :held]


def _appended(cache: Sequence[Float], new: Sequence[Float]) -> list[Float]:
    """A cache with new rows behind its own, `[heads, tokens, width]` each."""
    return [np.concatenate(pair, axis=1) for pair in zip(cache, new, strict=True)]


def rounds(runner: Runner, traces: Sequence[Continuation], shape: TreeShape) -> AcceptedRounds:
    """Decode every continuation speculatively, each to the end of its text."""
    accepted: list[int] = []
    for trace in traces:
        accepted += Replay(runner, trace).rounds(shape)
    return AcceptedRounds(accepted, shape.depth)


def first_guesses(runner: Runner, traces: Sequence[Continuation]) -> Iterator[tuple[int, int]]:
    """Yield, for each position behind each prompt, the drafter's first guess and the target's
    token, where the records of all tokens before are there."""
    for trace in traces:
        replay = Replay(runner, trace)
        for position in range(trace.prompt, len(trace.ids) - 1):
            guess = replay.guesses(position, position + 1, held=position)[0]
            yield int(guess), trace.ids[position + 1]


def offline(runner: Runner, traces: Sequence[Continuation], *, cold: bool) -> Offline:
    """Measure how good text is that the device writes alone, by its length: after the link was lost
    right behind the prompt, or with `cold` without ever a link. Returns the share of guesses that
    agree with the target since the length before, and the share of texts that are the target's own
    so far.

    One pass over the target's text gives both figures: an offline text equals the target's exactly
    as long as every guess on the target's text was right.
    """
    hits_of_texts = [_alone(runner, trace, 0 if cold else trace.prompt) for trace in traces]
    lengths = []
    agreement = []
    unbroken = []
    before = 0
    for length in _LENGTHS:
        are_unbroken = [all(hits[:length]) for hits in hits_of_texts if len(hits) >= length]
        if not are_unbroken:
            break  # no text is so long
        since_before: list[bool] = []
        for hits in hits_of_texts:
            since_before += hits[before:length]
        lengths.append(length)
        agreement.append(round(float(np.mean(since_before)), 4))
        unbroken.append(round(float(np.mean(are_unbroken)), 4))
        before = length
    return Offline(lengths=tuple(lengths), agreement=tuple(agreement), unbroken=tuple(unbroken))


def _alone(runner: Runner, trace: Continuation, held: int) -> list[bool]:
    """Returns for each token behind the prompt whether the drafter would have guessed it, with the
    records of the text's first `held` tokens and no more."""
    if len(trace.ids) - trace.prompt < 2:
        return []
    replay = Replay(runner, trace, held)
    last = len(trace.ids) - 1
    if runner.spec.features:
        # Each token reads what the one before it made: one at a time.
        positions = range(trace.prompt, last)
        guesses = [replay.guesses(position, position + 1, held)[0] for position in positions]
    else:
        guesses = list(replay.guesses(trace.prompt, last, held))
    targets = trace.ids[trace.prompt + 1 :]
    return [int(guess) == token for guess, token in zip(guesses, targets, strict=True)]


class Reference:
    """Recorded texts of the target, and the float32 drafter's acceptance on them."""

    def __init__(self, traces: Sequence[Continuation], reference: TorchRunner, origin: str) -> None:
        self.traces = traces
        self.reference = reference
        self.origin = origin

    @property
    def tokens(self) -> int:
        """Tokens of the target's continuations."""
        return sum(len(trace.ids) - trace.prompt for trace in self.traces)

    @property
    def _shape(self) -> TreeShape:
        """A tree, or a chain where layers keep running states, which cannot branch."""
        return CHAIN if self.reference.spec.states else TREE

    @cached_property
    def _reference_rounds(self) -> AcceptedRounds:
        return rounds(self.reference, self.traces, self._shape)

    @cached_property
    def _reference_guesses(self) -> list[int]:
        return [guess for guess, _ in first_guesses(self.reference, self.traces)]

    def judge(self, runner: Runner) -> Agreement:
        """Measure how well the drafter in this form agrees with the target (`top1`, `acceptance`),
        and with itself in float32 (`top1_same`, `acceptance_ratio`)."""
        guesses = []
        hits = []
        for guess, token in first_guesses(runner, self.traces):
            guesses.append(guess)
            hits.append(guess == token)
        same = np.array(guesses) == np.array(self._reference_guesses)
        acceptance = rounds(runner, self.traces, self._shape).tokens_per_round
        return Agreement(
            prompts=len(self.traces),
            tokens=self.tokens,
            top1=round(float(np.mean(hits)), 4),
            top1_same=round(float(np.mean(same)), 4),
            acceptance=round(acceptance, 4),
            acceptance_ratio=round(acceptance / self._reference_rounds.tokens_per_round, 4),
        )

    def calibration(self) -> Calibration:
        """Measure what a device expects of this drafter: acceptance by depth, by which it chooses
        how deep to draft, and how long text that it writes alone can be trusted."""
        chain = rounds(self.reference, self.traces, CHAIN)
        tree = self._reference_rounds
        used = self._shape
        shape = TreeUsed(breadth=used.breadth, depth=used.depth, nodes=used.nodes)
        return Calibration(
            prompts=len(self.traces),
            tokens=self.tokens,
            source=self.origin,
            acceptance=Acceptance(chain=chain.by_depth(), tree=tree.by_depth(), tree_shape=shape),
            offline=offline(self.reference, self.traces, cold=False),
            cold=offline(self.reference, self.traces, cold=True),
        )
