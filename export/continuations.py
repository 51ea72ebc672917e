"""The target's greedy continuations of held-out prompts, with their activation records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export.source import Source
from moa.errors import UsageError
from moa.model.choosing import Continued, generate
from moa.model.target import Committed, Target
from moa.training.sources import DocumentReader, SourceExample, examples, string


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
        if file.suffix == ".jsonl":
            prompts += [string(example.fields, "prompt", example.where) for example in examples([str(file)])]
            continue
        try:
            prompts += filter(str.strip, file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompts in {file}: {error}") from None
    if not prompts:
        raise UsageError("the calibration files hold no prompt")
    return prompts


def encode_prompts(target: Target, prompts: Sequence[str]) -> list[list[int]]:
    """Ids as a chat sends them: through the chat template, if the tokenizer has one."""
    reader = DocumentReader(target.tokenizer, target.facts.vocab_size)
    return [reader.prompt(SourceExample("a prompt", {"prompt": prompt}), 0) for prompt in prompts]


def make_traces(
    target: Target, source: Source, prompts: Sequence[Sequence[int]], *, new_tokens: int = 96
) -> list[Continuation]:
    """Let the target continue every prompt greedily, as many at a time as it has slots."""
    room = target.pool.capacity - new_tokens - 1
    if longest := next((len(p) for p in prompts if not 0 < len(p) <= room), None):
        raise UsageError(f"a calibration prompt has {longest} tokens, at most {room} fit")
    records: list[list[list[torch.Tensor]]] = [[] for _ in prompts]
    texts = []
    for start in range(0, len(prompts), target.pool.slots):
        seen = partial(_record, source, records[start:])
        texts += generate(target, prompts[start : start + target.pool.slots], new_tokens, seen=seen)
    return [_trace(text, parts) for text, parts in zip(texts, records, strict=True)]


def _record(source: Source, records: list[list[list[torch.Tensor]]], place: int, done: Committed) -> None:
    """Keep the records of tokens that the target has run."""
    if not source.spec.records:
        return
    with torch.inference_mode():
        made = source.module.project(done.k, done.v, done.hidden, done.positions)
    last = len(done.k) - source.spec.borrowed
    theirs = [half[layer] for layer in range(last, len(done.k)) for half in (done.k, done.v)]
    records[place].append([rows.clone() for rows in (*made, *theirs)])


def _trace(text: Continued, parts: list[list[torch.Tensor]]) -> Continuation:
    if not parts:
        return Continuation(text.ids, text.prompt, None, None)
    joined = [torch.cat(side).transpose(0, 1).float().contiguous().numpy() for side in zip(*parts, strict=True)]
    return Continuation(text.ids, text.prompt, joined[0], joined[1], joined[2:])
