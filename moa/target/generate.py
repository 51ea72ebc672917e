"""Plain decoding of several prompts at once, without drafts: for training data, and for texts that
exports replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moa.sampling import SamplingSettings
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import Committed, Step, Target
from moa.target.rows import Row
from moa.wire.finish import TurnRules, first_finish

PREFILL_CHUNK = 512
"""Tokens of a prompt in one forward."""


@dataclass
class Continued:
    """A prompt and what follows it."""

    ids: list[int]
    prompt: int
    """The prompt's length."""
    finish: str = ""
    """Why the text ended; empty while it goes on."""


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: SamplingSettings | None = None,
    seen: Callable[[int, Any], None] = lambda _, __: None,
) -> list[Continued]:
    """Continue every prompt by up to `new_tokens` tokens, all prompts side by side, each in a slot
    of the target's cache. `seen(index, committed)` is called, in order, with what the target has
    run of the text with that index: a piece of its prompt, or a token of its answer."""
    sampling = sampling or SamplingSettings()
    texts = [Continued(list(prompt), len(prompt)) for prompt in prompts]
    eos = frozenset(target.facts.eos_ids)
    slots = [target.cache.acquire() for _ in texts]
    try:
        for index, text in enumerate(texts):
            for committed in _prefill(target, slots[index], text.ids[:-1]):
                seen(index, committed)
        while active := [index for index, text in enumerate(texts) if not text.finish]:
            ids = [texts[index].ids for index in active]
            step, next_tokens = _run_last_tokens(
                target, [slots[index] for index in active], ids, sampling
            )
            for row, index in enumerate(active):
                seen(index, target.commit(step, row, [0]))
                text = texts[index]
                rules = TurnRules(text.prompt, new_tokens, target.cache.capacity, eos)
                _, text.finish = first_finish(rules, text.ids, [next_tokens[row]], None)
                text.ids.append(next_tokens[row])
    finally:
        for slot in slots:
            target.cache.release(slot)
    return texts


def _run_last_tokens(
    target: Target,
    slots: Sequence[int],
    texts: Sequence[list[int]],
    sampling: SamplingSettings,
) -> tuple[Step, list[int]]:
    """Run the last token of each text, which its slot has not run yet. Returns the forward, and the
    next token of each text."""
    rows = []
    judged = []
    for slot, ids in zip(slots, texts, strict=True):
        # A draft of one node, without a parent (-1), after which the target chooses.
        rows.append(Row.chain(slot, ids[-1:]))
        judged.append(Judged(ids[-1:], [-1], ids, sampling))
    step = target.forward(rows)
    return step, [accepted.next_token for accepted in accept_rows(step, judged)]


def _prefill(target: Target, slot: int, ids: Sequence[int]) -> Iterator[Committed]:
    """Run a prompt's tokens in pieces, which bounds the memory of a forward, and yield what the
    target has kept of each piece."""
    for start in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[start : start + PREFILL_CHUNK]
        step = target.forward([Row.chain(slot, chunk, judged="none")])
        yield target.commit(step, 0, range(len(chunk)))
