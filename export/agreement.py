"""Acceptance of a drafter in any form, replayed on the target's recorded continuations, without the
target.

Greedy verification accepts exactly the drafts that equal the target's text, so the text is enough
to know what a round would accept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.runner import Float, Runner, StepInput, TorchRunner
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
    """Prompts: `.jsonl` with a "prompt" in each line, or text with one prompt a line."""
    prompts: list[str] = []
    for file in files:
        if file.suffix == ".jsonl":
            prompts += [
                string(example.fields, "prompt", example.where) for example in examples([str(file)])
            ]
            continue
        try:
            prompts += filter(str.strip, file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from None
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
    """Let the target continue every prompt greedily, as many at a time as it has slots."""
    room = target.cache.capacity - new_tokens - 1
    if longest := next((len(p) for p in prompts if not 0 < len(p) <= room), None):
        raise UsageError(f"a calibration prompt has {longest} tokens, at most {room} fit")
    traces: list[Continuation] = []
    for start in range(0, len(prompts), target.cache.slots):
        some = prompts[start : start + target.cache.slots]
        kept = [KeptRecords(source.module) for _ in some]
        texts = generate(target, some, new_tokens, seen=partial(_keep, kept))
        traces += [one.trace(text) for text, one in zip(texts, kept, strict=True)]
    return traces


def _keep(kept: Sequence[KeptRecords], place: int, done: Committed) -> None:
    kept[place].add(done)


class KeptRecords:
    """The activation records of one text, made while the target runs it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._halves: list[RecordPair] = []
        self._states = StatesBefore()

    def add(self, done: Committed) -> None:
        """The target has run these tokens."""
        if self._drafter.record_layout is None:
            return
        if self._drafter.taps:
            done = self._states.of(done)
        self._halves.append(self._drafter.records([done]))

    def trace(self, text: Continued) -> Continuation:
        """The text with its records: those of cross-attention, and rows of layers with a cache."""
        layout = self._drafter.record_layout
        if layout is None:
            return Continuation(text.ids, text.prompt, None, None)
        keys, values = (
            layout.split(np.concatenate(half)) for half in zip(*self._halves, strict=True)
        )
        rows = [
            np.ascontiguousarray(half.transpose(1, 0, 2))
            for part in zip(keys, values, strict=True)
            for half in part
        ]
        if self._drafter.graph_spec.records is None:
            return Continuation(text.ids, text.prompt, None, None, rows)
        return Continuation(text.ids, text.prompt, rows[0], rows[1], rows[2:])


@dataclass(frozen=True)
class AcceptedRounds:
    """Accepted drafts of every round."""

    accepted: list[int]
    depth: int

    @property
    def tokens_per_round(self) -> float:
        """The acceptance length as the paper counts it: accepted drafts and the target's own token."""
        return float(np.mean(self.accepted)) + 1.0 if self.accepted else 0.0

    def by_depth(self) -> tuple[float, ...]:
        """Entry d: the share of rounds that accepted at least d+1 drafts."""
        rounds = np.array(self.accepted)
        return tuple(
            round(float((rounds >= depth).mean()), 4) if len(rounds) else 0.0
            for depth in range(1, self.depth + 1)
        )


class Replay:
    """One continuation and the drafter's cache, at any point of the text."""

    def __init__(self, runner: Runner, trace: Continuation, held: int | None = None) -> None:
        """`held`: how many records are there, by default all."""
        self.runner = runner
        self.trace = trace
        self.held = len(trace.ids) if held is None else held
        self.rows: list[Float] = [
            np.zeros((layer.kv_heads, 0, layer.head_dim), np.float32)
            for layer in runner.spec.cache
            for _ in "kv"
        ]
        self._states: tuple[int, list[Float]] = (0, [])
        """Running states, and how many of the text's tokens they stand for."""
        self.advance(
            len(trace.ids)
        )  # cache rows depend on tokens, and on the records that carry some

    def advance(self, end: int) -> None:
        """Extend the cache to the text's first `end` tokens."""
        while (start := self.rows[0].shape[1]) < end:
            # Without records each token of a drafter of states reads what the one before it made.
            stop = min(end, start + (1 if self.runner.spec.features else _CHUNK))
            out = self.runner.step(self._text(start, stop, start, queries=[stop - start - 1]))
            self._states = stop, out.states
            own = len(out.rows) - len(self.trace.borrowed)
            theirs = [rows[:, start : min(stop, self.held)] for rows in self.trace.borrowed]
            lent = [
                np.concatenate([a, b[:, a.shape[1] :]], axis=1)
                for a, b in zip(theirs, out.rows[own:], strict=True)
            ]
            new = [*out.rows[:own], *lent]
            self.rows = [np.concatenate(pair, axis=1) for pair in zip(self.rows, new, strict=True)]

    def draft(self, pending: int, shape: TreeShape) -> int:
        """Draft after the text's token `pending`; returns how many drafts the target would accept."""
        self.advance(pending)
        text = self.trace.ids
        best = self._tree(pending, shape)
        depths = best.depths()
        following = [
            *text[pending + 1 :],
            *[-1] * (shape.depth + 1),
        ]  # after the text's end nothing counts as accepted
        return (
            len(accept(best.tokens, best.parents, lambda node: following[int(depths[node])]).path)
            - 1
        )

    def _tree(self, pending: int, shape: TreeShape) -> DraftTree:
        grower = TreeGrower(self.trace.ids[pending], shape)
        place = {-1: pending - 1}
        states = self._states_at(pending)
        drafted = [row[:, :pending] for row in self.rows]
        while grower.frontier:
            above = [place[grower.parents[node]] for node in grower.frontier]
            place |= {node: drafted[0].shape[1] + at for at, node in enumerate(grower.frontier)}
            tree = grower.mask()
            mask = np.concatenate([np.ones((len(tree), pending), np.bool_), tree], axis=1)
            at = [pending + grower.level] * len(tree)
            ids = grower.frontier_tokens
            records = self._records(pending)
            out = self.runner.step(
                StepInput(
                    ids,
                    range(len(tree)),
                    at,
                    mask,
                    drafted,
                    *records,
                    feature_rows=above,
                    states=states,
                )
            )
            states = out.states
            drafted = [np.concatenate(pair, axis=1) for pair in zip(drafted, out.rows, strict=True)]
            grower.expand(out.top_tokens, out.top_logp)
        return grower.tree()

    def rounds(self, shape: TreeShape) -> list[int]:
        """Speculative decoding to the end of the text: accepted drafts of every round."""
        accepted: list[int] = []
        pending = self.trace.prompt
        while pending < len(self.trace.ids) - 1:
            accepted.append(self.draft(pending, shape))
            pending += accepted[-1] + 1
        return accepted

    def guesses(self, start: int, end: int, held: int) -> NDArray[np.int64]:
        """First guesses after each of the text's tokens `start..end-1`, with the first `held`
        records."""
        return self.runner.step(self.along(start, end, held=held)).top_tokens[:, 0]

    def along(self, start: int, end: int, *, held: int) -> StepInput:
        """The step over the text's tokens `start..end-1`, with the first `held` records."""
        self.advance(start)
        return self._text(start, end, held, range(end - start))

    def _text(self, start: int, end: int, held: int, queries: Sequence[int]) -> StepInput:
        causal = np.tril(np.ones((end - start, end), np.bool_), start)
        past = [row[:, :start] for row in self.rows]
        ids = self.trace.ids[start:end]
        positions = range(start, end)
        known = [start - 1, *[-1] * (end - start - 1)]
        return StepInput(
            ids,
            queries,
            positions,
            causal,
            past,
            *self._records(held),
            feature_rows=known,
            states=self._states_at(start),
        )

    def _states_at(self, start: int) -> list[Float]:
        """Running states after the text's first tokens. They are kept at one place alone: further
        ones are found from there, earlier ones from the beginning."""
        if not self.runner.spec.states:
            return []
        known, _ = self._states
        if known > start:
            self._states = (known := 0), []
        while known < start:
            stop = min(start, known + _CHUNK)
            step = self._text(known, stop, known, queries=[stop - known - 1])
            known = stop
            self._states = known, self.runner.step(step).states
        return self._states[1]

    def _records(self, held: int) -> tuple[Float | None, Float | None]:
        key = self.trace.record_k
        value = self.trace.record_v
        return None if key is None else key[:, :held], None if value is None else value[:, :held]


def rounds(runner: Runner, traces: Sequence[Continuation], shape: TreeShape) -> AcceptedRounds:
    """Speculative decoding of every continuation, to the end of its text."""
    each = (Replay(runner, trace).rounds(shape) for trace in traces)
    return AcceptedRounds([drafts for found in each for drafts in found], shape.depth)


def first_guesses(runner: Runner, traces: Sequence[Continuation]) -> Iterator[tuple[int, int]]:
    """At every position of every continuation, with all records: (first guess, the target's token)."""
    for trace in traces:
        replay = Replay(runner, trace)
        for at in range(trace.prompt, len(trace.ids) - 1):
            yield int(replay.guesses(at, at + 1, at)[0]), trace.ids[at + 1]


def offline(runner: Runner, traces: Sequence[Continuation], *, cold: bool) -> Offline:
    """Quality of offline text after the link is lost right after the prompt, or without any
    connection: agreement by distance from the prompt.

    One pass over the target's text gives both figures: an offline text equals the target's exactly
    as long as every guess on the target's text was right.
    """
    right = [_alone(runner, trace, 0 if cold else trace.prompt) for trace in traces]
    lengths = []
    agreement = []
    unbroken = []
    before = 0
    for length in _LENGTHS:
        within = [hit for hits in right for hit in hits[before:length]]
        reached = [all(hits[:length]) for hits in right if len(hits) >= length]
        if not within or not reached:
            break
        lengths.append(length)
        agreement.append(round(float(np.mean(within)), 4))
        unbroken.append(round(float(np.mean(reached)), 4))
        before = length
    return Offline(lengths=tuple(lengths), agreement=tuple(agreement), unbroken=tuple(unbroken))


def _alone(runner: Runner, trace: Continuation, held: int) -> list[bool]:
    if len(trace.ids) - trace.prompt < 2:
        return []
    replay = Replay(runner, trace, held)
    last = len(trace.ids) - 1
    if runner.spec.features:
        guesses = [replay.guesses(at, at + 1, held)[0] for at in range(trace.prompt, last)]
    else:
        guesses = list(replay.guesses(trace.prompt, last, held))
    return [
        int(guess) == token
        for guess, token in zip(guesses, trace.ids[trace.prompt + 1 :], strict=True)
    ]


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
        """Compare a form with the float32 drafter."""
        pairs = list(first_guesses(runner, self.traces))
        found = rounds(runner, self.traces, self._shape).tokens_per_round
        same = [
            guess == wanted
            for (guess, _), wanted in zip(pairs, self._reference_guesses, strict=True)
        ]
        return Agreement(
            prompts=len(self.traces),
            tokens=self.tokens,
            top1=round(float(np.mean([guess == token for guess, token in pairs])), 4),
            top1_same=round(float(np.mean(same)), 4),
            acceptance=round(found, 4),
            acceptance_ratio=round(found / self._reference_rounds.tokens_per_round, 4),
        )

    def calibration(self) -> Calibration:
        """Calibration for the controller and the offline guard."""
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
