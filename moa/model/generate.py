"""Speculative decoding on one machine: target and drafter in one process, several prompts at a time.

The text is the target's own: greedy text is its greedy text, and a sampled token is a fixed function of its logits,
the settings, the seed and the position. A drafter only changes how many forward passes that takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from moa.errors import UsageError
from moa.grammar.matcher import CompiledGrammar, Matcher, forced_draft
from moa.grammar.spec import Grammar
from moa.model.choosing import Judged, accept_rows
from moa.model.drafting import Drafting, DraftRequest
from moa.model.target import Committed, Row, Step, Target
from moa.sampling import SamplingSettings
from moa.speculation.policy import Drafted, Policy, RoundTime, TextAcceptance
from moa.tree import Accepted, DraftTree, TreeShape
from moa.wire.finish import Decode, TurnRules, first_finish

PREFILL_CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """When to stop, how to sample, how far to draft (`shape=None`: not at all).

    With `adapt`, the depth of a draft follows measured cost and acceptance, down to no draft; without, it is always
    that of `shape`.
    """

    max_new_tokens: int = 256
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    shape: TreeShape | None = field(default_factory=TreeShape)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    adapt: bool = True
    grammar: Grammar | None = None
    """What every answer must match."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        if self.grammar is not None and self.ignore_eos:
            raise UsageError("a grammar says where the text ends: it cannot be used with ignore_eos")


@dataclass
class Generation:
    """The result for one prompt. `won` counts the tokens of every round: accepted ones and the target's own."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    won: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens won per verification, the target's own included (the paper's tau)."""
        return sum(self.won) / len(self.won) if self.won else 0.0


@dataclass
class Seconds:
    """Time of a run by phase."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    observe: float = 0.0


@dataclass
class _Sequence:
    index: int
    log: list[int]
    rules: TurnRules
    slot: int
    out: Generation
    matcher: Matcher | None = None
    draft_slot: int | None = None
    acceptance: TextAcceptance | None = None
    unseen: list[tuple[Sequence[int], Committed]] = field(default_factory=list)
    """Committed tokens that the drafter has not seen yet; it gets them before it drafts again."""
    levels: int = 0
    """Levels asked for in the latest round; 0: none."""
    latest: int = 0
    """How many pieces of that are the latest round's, 0 or 1: reading it is a part of any drafted round."""

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.log) - 1

    @property
    def missed(self) -> int:
        """Tokens that the drafter has still to read, beside the latest round's."""
        return sum(len(tokens) for tokens, _ in self.unseen[: len(self.unseen) - self.latest])


class Speculator:
    """Generates with a target, and with a drafter if there is one."""

    def __init__(self, target: Target, drafting: Drafting | None = None) -> None:
        self.target, self.drafting = target, drafting
        self.seconds = Seconds()
        self._policies: dict[TreeShape, Policy] = {}
        self._caught_up = 0.0
        """Seconds of this round that were spent to catch up with earlier rounds: they are no cost of drafting in this
        one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings | None = None
    ) -> list[Generation]:
        """Continue every prompt. Prompts wait when all slots are in use."""
        outputs = [Generation() for _ in prompts]
        for index, tokens, finish in self.stream(prompts, settings, outputs):
            outputs[index].ids += tokens
            outputs[index].finish = finish
        return outputs

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | None = None,
        outputs: Sequence[Generation] | None = None,
    ) -> Iterator[tuple[int, list[int], str]]:
        """(prompt index, new tokens, why it ended or "") after every verification, as they come."""
        settings = settings or GenerationSettings()
        outputs = outputs or [Generation() for _ in prompts]
        waiting = deque(enumerate(prompts))
        compiled = self.target.grammars.compile(settings.grammar) if settings.grammar is not None else None
        active: list[_Sequence] = []
        try:
            while waiting or active:
                while waiting and self.target.pool.free:
                    index, prompt = waiting.popleft()
                    active.append(self._open(index, prompt, settings, outputs[index], compiled))
                for sequence, tokens in self._round(active, settings):
                    yield sequence.index, tokens, sequence.out.finish
                    if sequence.out.finish:
                        active.remove(sequence)
                        self._close(sequence)
        finally:
            for sequence in active:
                self._close(sequence)

    def policy(self, shape: TreeShape) -> Policy:
        """What is known of the costs of such trees, over all calls."""
        if shape not in self._policies:
            self._policies[shape] = Policy(shape)
        return self._policies[shape]

    def _open(
        self,
        index: int,
        prompt: Sequence[int],
        settings: GenerationSettings,
        out: Generation,
        compiled: CompiledGrammar | None,
    ) -> _Sequence:
        if not prompt:
            raise UsageError(f"prompt {index} is empty: it needs at least one token")
        capacity = self.target.pool.capacity
        if len(prompt) >= capacity:
            raise UsageError(f"prompt {index} has {len(prompt)} tokens, the context holds {capacity}")
        if not all(0 <= token < self.target.facts.vocab_size for token in prompt):
            raise UsageError(f"prompt {index}: token ids must be 0..{self.target.facts.vocab_size - 1}")
        eos = () if settings.ignore_eos else self.target.facts.eos_ids
        rules = TurnRules(len(prompt), settings.max_new_tokens, capacity, frozenset(eos), settings.stop)
        matcher = compiled.matcher(len(prompt)) if compiled is not None else None
        sequence = _Sequence(index, list(prompt), rules, self.target.pool.acquire(), out, matcher)
        try:
            if self.drafting is not None and settings.shape is not None:
                sequence.draft_slot = self.drafting.open()
                if settings.adapt:
                    sequence.acceptance = self.policy(settings.shape).text(settings.sampling.temperature)
            self._prefill(sequence)
        except BaseException:
            self._close(sequence)
            raise
        return sequence

    def _prefill(self, sequence: _Sequence) -> None:
        began = time.perf_counter()
        for start in range(0, sequence.base, PREFILL_CHUNK):
            chunk = sequence.log[start : min(start + PREFILL_CHUNK, sequence.base)]
            step = self.target.forward([Row.chain(sequence.slot, chunk, judged="none")])
            self._commit(sequence, step, 0, list(range(len(chunk))), chunk)
        self.seconds.prefill += time.perf_counter() - began

    def _close(self, sequence: _Sequence) -> None:
        self.target.pool.release(sequence.slot)
        if sequence.draft_slot is not None and self.drafting is not None:
            self.drafting.close(sequence.draft_slot)

    def _commit(self, sequence: _Sequence, step: Step, row: int, path: list[int], tokens: Sequence[int]) -> None:
        committed = self.target.commit(step, row, path)
        if sequence.draft_slot is not None:
            sequence.unseen.append((tokens, committed))

    def _catch_up(self, sequence: _Sequence, policy: Policy) -> int:
        """Give the drafter the text it has not seen; returns its slot. What it missed before the latest round is timed
        by itself."""
        assert sequence.draft_slot is not None
        assert self.drafting is not None
        missed = sequence.missed
        if missed:
            began, cut = time.perf_counter(), len(sequence.unseen) - sequence.latest
            tokens = [token for piece, _ in sequence.unseen[:cut] for token in piece]
            whole = Committed.joined([committed for _, committed in sequence.unseen[:cut]])
            self.drafting.observe(sequence.draft_slot, tokens, whole)
            took = time.perf_counter() - began
            self._caught_up += took
            policy.read(missed, took)
        if sequence.latest and sequence.unseen:
            tokens_now, committed = sequence.unseen[-1]
            self.drafting.observe(sequence.draft_slot, tokens_now, committed)
        sequence.unseen.clear()
        return sequence.draft_slot

    def _round(self, active: list[_Sequence], settings: GenerationSettings) -> list[tuple[_Sequence, list[int]]]:
        """Draft for all sequences, verify all in one forward, and append the accepted tokens."""
        began, self._caught_up = time.perf_counter(), 0.0
        trees = self._draft(active, settings)
        drafted = time.perf_counter()
        rows = [Row(s.slot, tree.tokens, tree.parents) for s, tree in zip(active, trees, strict=True)]
        step = self.target.forward(rows)
        judged = [_judged(s, tree, settings.sampling) for s, tree in zip(active, trees, strict=True)]
        chosen = accept_rows(step, judged)
        verified = time.perf_counter()
        results = []
        for b, (sequence, accepted) in enumerate(zip(active, chosen, strict=True)):
            path = accepted.path
            tokens = [*(trees[b].tokens[node] for node in path[1:]), accepted.next_token]
            count, finish = first_finish(sequence.rules, sequence.log, tokens, self._decode(settings))
            sequence.out.finish = finish
            sequence.out.won.append(count)
            sequence.out.drafted += len(trees[b]) - 1
            if not finish:
                self._commit(sequence, step, b, path, [trees[b].tokens[node] for node in path])
                sequence.latest = 1
            sequence.log += tokens[:count]
            results.append((sequence, tokens[:count]))
        ended = time.perf_counter()
        self.seconds.draft += drafted - began
        self.seconds.verify += verified - drafted
        self.seconds.observe += ended - verified
        self._learn(settings, active, trees, chosen, drafted - began - self._caught_up, ended - drafted)
        return results

    def _learn(
        self,
        settings: GenerationSettings,
        active: list[_Sequence],
        trees: list[DraftTree],
        chosen: Sequence[Accepted],
        draft: float,
        verify: float,
    ) -> None:
        """Record the time and the accepted tokens of the round, which decide how far to draft next."""
        if settings.shape is None or not settings.adapt or self.drafting is None:
            return  # nobody would ask
        drafts = [
            Drafted(sequence.acceptance, sequence.levels, int(max(tree.depths())), len(tree) - 1, len(one.path) - 1)
            for sequence, tree, one in zip(active, trees, chosen, strict=True)
            if sequence.acceptance is not None and sequence.levels
        ]
        ran = RoundTime(tokens=sum(map(len, trees)), forward_seconds=verify, draft_seconds=draft)
        self.policy(settings.shape).record(drafts, ran)

    def _draft(self, active: list[_Sequence], settings: GenerationSettings) -> list[DraftTree]:
        requests: list[DraftRequest] = []
        trees = [DraftTree([s.log[-1]], [-1], [0.0]) for s in active]
        shape, wishes = settings.shape, []
        if self.drafting is None or shape is None:
            return trees
        for place, (sequence, levels) in enumerate(zip(active, self._levels(active, settings, shape), strict=True)):
            # The pending token needs a place in the cache, and no draft may outgrow what is left.
            room = self.target.pool.capacity - sequence.base - 1
            sequence.levels = levels if room > 0 else 0
            mask = sequence.matcher.after(sequence.log) if sequence.matcher is not None else None
            if room > 0 and (forced := forced_draft(mask, sequence.log[-1], least=levels, most=min(shape.nodes, room))):
                trees[place], sequence.levels = forced, 0
            elif sequence.levels:
                fitted = self.policy(shape).shape(levels) if settings.adapt else shape
                fitting = replace(fitted, nodes=min(fitted.nodes, room))
                slot = self._catch_up(sequence, self.policy(shape))
                requests.append(DraftRequest(slot, sequence.log[-1], fitting, settings.sampling, mask))
                wishes.append(place)
        if requests:
            for place, tree in zip(wishes, self.drafting.draft(requests), strict=True):
                trees[place] = tree
        return trees

    def _levels(self, active: list[_Sequence], settings: GenerationSettings, shape: TreeShape) -> list[int]:
        texts = [sequence.acceptance for sequence in active if sequence.acceptance is not None]
        if len(texts) < len(active):
            return [0 if sequence.draft_slot is None else shape.depth for sequence in active]
        return self.policy(shape).plan(texts, (sequence.missed for sequence in active))

    def _decode(self, settings: GenerationSettings) -> Decode | None:
        if not settings.stop:
            return None
        tokenizer = self.target.tokenizer
        return lambda ids: tokenizer.decode(list(ids))


def _judged(sequence: _Sequence, tree: DraftTree, sampling: SamplingSettings) -> Judged:
    if sequence.matcher is None:
        return Judged(tree.tokens, tree.parents, sequence.log, sampling)
    tokens, masks = sequence.matcher.after(sequence.log).judge(tree.tokens, tree.parents)
    return Judged(tokens, tree.parents, sequence.log, sampling, masks)
