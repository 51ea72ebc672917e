"""The target's greedy continuations of held-out prompts, with their activation records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export.source import Source
from moa.errors import UsageError
from moa.model.target import Row, Target


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's greedy continuation. Records `[Hc, len(ids), D]`, or none for independent drafters."""

    ids: list[int]
    prompt: int
    """Length of the prompt."""
    record_k: NDArray[np.float32] | None
    record_v: NDArray[np.float32] | None
    borrowed: list[NDArray[np.float32]] = field(default_factory=list)
    """The target's keys and values `[heads, len(ids), D]` in the borrowed layers, by layer."""


def read_prompts(files: Sequence[Path]) -> list[str]:
    """Prompts: `.jsonl` with a "prompt" in each line, or text with one prompt a line."""
    prompts: list[str] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from None
        for number, line in enumerate(filter(str.strip, lines), 1):
            if file.suffix != ".jsonl":
                prompts.append(line)
                continue
            try:
                prompts.append(str(json.loads(line)["prompt"]))
            except (json.JSONDecodeError, KeyError, TypeError):
                raise UsageError(f'{file}, prompt {number}: every line must be an object with a "prompt"') from None
    if not prompts:
        raise UsageError("the calibration files hold no prompt")
    return prompts


def encode_prompts(target: Target, prompts: Sequence[str]) -> list[list[int]]:
    """Ids as a chat sends them: through the chat template, if the tokenizer has one."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return [tokenizer.encode(prompt) for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def make_traces(
    target: Target, source: Source, prompts: Sequence[Sequence[int]], *, new_tokens: int = 96
) -> list[Continuation]:
    """Let the target continue every prompt greedily, as many at a time as it has slots."""
    traces: list[Continuation] = []
    at_once = target.pool.slots
    for start in range(0, len(prompts), at_once):
        traces += _continue(target, source, prompts[start : start + at_once], new_tokens)
    return traces


def _continue(target: Target, source: Source, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Continuation]:
    room = target.pool.capacity - new_tokens - 1
    if longest := next((len(p) for p in prompts if not 0 < len(p) <= room), None):
        raise UsageError(f"a calibration prompt has {longest} tokens, at most {room} fit")
    slots = [target.pool.acquire() for _ in prompts]
    ids = [list(prompt) for prompt in prompts]
    pending = dict(enumerate(ids[b][:] for b in range(len(ids))))
    records: list[list[list[torch.Tensor]]] = [[] for _ in prompts]
    while pending:
        rows = [Row.chain(slots[b], tokens) for b, tokens in pending.items()]
        step = target.forward(rows)
        following: dict[int, list[int]] = {}
        for place, (b, tokens) in enumerate(pending.items()):
            token = int(step.argmax(place)[-1])
            done = target.commit(step, place, range(len(tokens)))
            if source.spec.records:
                with torch.inference_mode():
                    made = source.module.project(done.k, done.v, done.hidden, done.positions)
                last = len(done.k) - source.spec.borrowed
                theirs = [half[layer] for layer in range(last, len(done.k)) for half in (done.k, done.v)]
                records[b].append([rows.clone() for rows in (*made, *theirs)])
            ids[b].append(token)
            if token not in source.facts.eos_ids and len(ids[b]) - len(prompts[b]) < new_tokens:
                following[b] = [token]
        pending = following
    for slot in slots:
        target.pool.release(slot)
    return [_trace(ids[b], len(prompts[b]), records[b]) for b in range(len(prompts))]


def _trace(ids: list[int], prompt: int, parts: list[list[torch.Tensor]]) -> Continuation:
    if not parts:
        return Continuation(ids, prompt, None, None)
    joined = [torch.cat(side).transpose(0, 1).float().contiguous().numpy() for side in zip(*parts, strict=True)]
    return Continuation(ids, prompt, joined[0], joined[1], joined[2:])
