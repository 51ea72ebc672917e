"""Speculative decoding on one machine: target and drafter in one process, several prompts at a
time.

The text is the target's own: greedy text is its greedy text, and a sampled token is a fixed
function of its logits, the settings, the seed and the position. A drafter only changes how many
forward passes that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moa.drafters.contract import Drafting, DraftRequest
from moa.errors import UsageError
from moa.grammar.matcher import CompiledGrammar, Matcher, forced_draft
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.target.choosing import Judged, accept_rows
from moa.target.torch_target import Row, Step, Target
from moa.tree import DraftTree, TreeShape
from moa.wire.finish import Decode, TurnRules, first_finish

PREFILL_CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """When to stop, how to sample, how far to draft (`shape=None`: not at all)."""

    max_new_tokens: int = 256
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    shape: TreeShape | None = field(default_factory=TreeShape)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """What every answer must match."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        if self.grammar is not None and self.ignore_eos:
            raise UsageError(
                "a grammar says where the text ends: it cannot be used with ignore_eos"
            )


@dataclass
class Generation:
    """The result for one prompt. `won` counts the tokens of every round: accepted ones and the
    target's own."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    won: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens won per verification, the target's own included (the paper's tau)."""
        return sum(self.won) / len(self.won) if self.won else 0.0


@dataclass
class _Sequence:
    log: list[int]
    rules: TurnRules
    slot: int
    out: Generation
    matcher: Matcher | None = None
    draft_slot: int | None = None

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.log) - 1


class Speculator:
    """Generates with a target, and with a drafter if there is one."""

    def __init__(self, target: Target, drafting: Drafting | None = None) -> None:
        self.target = target
        self.drafting = drafting

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings | None = None
    ) -> list[Generation]:
        """Continue every prompt. Prompts wait when all slots are in use."""
        settings = settings or GenerationSettings()
        outputs = [Generation() for _ in prompts]
        waiting = deque(enumerate(prompts))
        compiled = (
            self.target.grammars.compile(settings.grammar) if settings.grammar is not None else None
        )
        active: list[_Sequence] = []
        try:
            while waiting or active:
                while waiting and self.target.cache.free:
                    index, prompt = waiting.popleft()
                    active.append(self._open(index, prompt, settings, outputs[index], compiled))
                self._round(active, settings)
                for sequence in [one for one in active if one.out.finish]:
                    active.remove(sequence)
                    self._close(sequence)
        finally:
            for sequence in active:
                self._close(sequence)
        return outputs

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
        capacity = self.target.cache.capacity
        if len(prompt) >= capacity:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens, the context holds {capacity}"
            )
        if not all(0 <= token < self.target.facts.vocab_size for token in prompt):
            raise UsageError(
                f"prompt {index}: token ids must be 0..{self.target.facts.vocab_size - 1}"
            )
        eos = () if settings.ignore_eos else self.target.facts.eos_ids
        rules = TurnRules(
            len(prompt), settings.max_new_tokens, capacity, frozenset(eos), settings.stop
        )
        matcher = compiled.matcher(len(prompt)) if compiled is not None else None
        sequence = _Sequence(list(prompt), rules, self.target.cache.acquire(), out, matcher)
        try:
            if self.drafting is not None and settings.shape is not None:
                sequence.draft_slot = self.drafting.open()
            self._prefill(sequence)
        except BaseException:
            self._close(sequence)
            raise
        return sequence

    def _prefill(self, sequence: _Sequence) -> None:
        for start in range(0, sequence.base, PREFILL_CHUNK):
            chunk = sequence.log[start : min(start + PREFILL_CHUNK, sequence.base)]
            step = self.target.forward([Row.chain(sequence.slot, chunk, judged="none")])
            self._commit(sequence, step, 0, range(len(chunk)), chunk)

    def _close(self, sequence: _Sequence) -> None:
        self.target.cache.release(sequence.slot)
        if sequence.draft_slot is not None and self.drafting is not None:
            self.drafting.close(sequence.draft_slot)

    def _commit(
        self, sequence: _Sequence, step: Step, row: int, path: Sequence[int], tokens: Sequence[int]
    ) -> None:
        committed = self.target.commit(step, row, path)
        if sequence.draft_slot is not None and self.drafting is not None:
            self.drafting.observe(sequence.draft_slot, tokens, committed)

    def _round(self, active: list[_Sequence], settings: GenerationSettings) -> None:
        """Draft for all sequences, verify all in one forward, and append the accepted tokens."""
        trees = self._draft(active, settings)
        rows = [
            Row(s.slot, tree.tokens, tree.parents) for s, tree in zip(active, trees, strict=True)
        ]
        step = self.target.forward(rows)
        judged = [
            _judged(s, tree, settings.sampling) for s, tree in zip(active, trees, strict=True)
        ]
        for b, (sequence, accepted) in enumerate(
            zip(active, accept_rows(step, judged), strict=True)
        ):
            run = [trees[b].tokens[node] for node in accepted.path]
            tokens = [*run[1:], accepted.next_token]
            count, finish = first_finish(
                sequence.rules, sequence.log, tokens, self._decode(settings)
            )
            sequence.out.finish = finish
            sequence.out.won.append(count)
            sequence.out.drafted += len(trees[b]) - 1
            if not finish:
                self._commit(sequence, step, b, accepted.path, run)
            sequence.log += tokens[:count]
            sequence.out.ids += tokens[:count]

    def _draft(self, active: list[_Sequence], settings: GenerationSettings) -> list[DraftTree]:
        requests: list[DraftRequest] = []
        trees = [DraftTree([s.log[-1]], [-1], [0.0]) for s in active]
        shape = settings.shape
        wishes = []
        if self.drafting is None or shape is None:
            return trees
        for place, sequence in enumerate(active):
            # The pending token needs a place in the cache, and no draft may outgrow what is left.
            room = self.target.cache.capacity - sequence.base - 1
            if room <= 0:
                continue
            mask = sequence.matcher.after(sequence.log) if sequence.matcher is not None else None
            if forced := forced_draft(
                mask, sequence.log[-1], least=shape.depth, most=min(shape.nodes, room)
            ):
                trees[place] = forced
            elif sequence.draft_slot is not None:
                fitting = replace(shape, nodes=min(shape.nodes, room))
                requests.append(
                    DraftRequest(
                        sequence.draft_slot, sequence.log[-1], fitting, settings.sampling, mask
                    )
                )
                wishes.append(place)
        if requests:
            for place, tree in zip(wishes, self.drafting.draft(requests), strict=True):
                trees[place] = tree
        return trees

    def _decode(self, settings: GenerationSettings) -> Decode | None:
        if not settings.stop:
            return None
        tokenizer = self.target.tokenizer
        return lambda ids: str(tokenizer.decode(list(ids)))


def _judged(sequence: _Sequence, tree: DraftTree, sampling: SamplingSettings) -> Judged:
    if sequence.matcher is None:
        return Judged(tree.tokens, tree.parents, sequence.log, sampling)
    tokens, masks = sequence.matcher.after(sequence.log).judge(tree.tokens, tree.parents)
    return Judged(tokens, tree.parents, sequence.log, sampling, masks)
