"""Plain decoding of several prompts at once, without drafts: for training data, and for texts that
exports replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moa.sampling import SamplingSettings
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import Target
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
    """Continue every prompt, each in a slot of its own. `seen` gets what the target has run
    (what its commits return), by the prompt's place."""
    texts = [Continued(list(prompt), len(prompt)) for prompt in prompts]
    eos = frozenset(target.facts.eos_ids)
    capacity = target.cache.capacity
    slots = [target.cache.acquire() for _ in texts]
    try:
        for place, text in enumerate(texts):
            for start in range(0, text.prompt - 1, PREFILL_CHUNK):
                chunk = text.ids[start : min(start + PREFILL_CHUNK, text.prompt - 1)]
                step = target.forward([Row.chain(slots[place], chunk, judged="none")])
                seen(place, target.commit(step, 0, range(len(chunk))))
        while active := [place for place, text in enumerate(texts) if not text.finish]:
            step = target.forward(
                [Row.chain(slots[place], texts[place].ids[-1:]) for place in active]
            )
            judged = [
                Judged(texts[at].ids[-1:], [-1], texts[at].ids, sampling or SamplingSettings())
                for at in active
            ]
            for row, (place, accepted) in enumerate(
                zip(active, accept_rows(step, judged), strict=True)
            ):
                seen(place, target.commit(step, row, [0]))
                text = texts[place]
                token = accepted.next_token
                rules = TurnRules(text.prompt, new_tokens, capacity, eos)
                _, text.finish = first_finish(rules, text.ids, [token], None)
                text.ids.append(token)
    finally:
        for slot in slots:
            target.cache.release(slot)
    return texts
