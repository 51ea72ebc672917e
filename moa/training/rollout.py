"""Rollouts: in some documents without activations the drafter goes on by itself, and learns from its own text.

Offline nobody corrects a drafter, so it must recover from its own deviations, which no text of others shows. The
target is asked at every position of such text what it would say there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from moa.errors import ConfigError
from moa.model.drafter import Drafter
from moa.model.drafting import DraftRequest, MoaDrafting
from moa.sampling import SamplingSettings
from moa.training.data import Batch
from moa.tree import TreeShape


@dataclass(frozen=True)
class Place:
    """Where the drafter writes: in which row of the batch, in a document from `start`, the tokens `begin`..`end`."""

    row: int
    start: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class RolloutRule:
    """How much the drafter writes itself."""

    tokens: int = 0
    """Tokens that it writes at most, up to its document's end; 0: none."""
    share: float = 0.5
    """Of the documents without activations."""

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 < self.share <= 1:
            raise ConfigError("rollouts: tokens must not be negative, and the share above 0, up to 1")

    def places(self, batch: Batch, latest: NDArray[np.int64], seed: int, step: int) -> list[Place]:
        """A random place in the answers of each chosen document; a function of seed, step and row. `latest` says which
        documents have an activation."""
        if not self.tokens:
            return []
        return [
            place
            for row, number in enumerate(batch.rows)
            for place in self._in_row(batch, latest, row, np.random.default_rng([seed, step, int(number), 1]))
        ]

    def _in_row(self, batch: Batch, latest: NDArray[np.int64], row: int, rng: np.random.Generator) -> list[Place]:
        places = []
        segments = batch.segments[row]
        for segment in range(1, int(segments.max()) + 1):
            chosen, luck = rng.random() < self.share, rng.random()
            inside = np.flatnonzero(segments == segment)
            # Two tokens before it: one to read, and one to go on from.
            free = [int(i) for i in inside[2:] if batch.wanted[row, i]]
            if chosen and free and latest[row, inside[-1]] < 0:
                begin, after = free[int(luck * len(free))], int(inside[-1]) + 1
                places.append(Place(row, int(inside[0]), begin, min(begin + self.tokens, after)))
        return places


def rolled_out(drafter: Drafter, batch: Batch, places: Sequence[Place], eos_ids: Collection[int]) -> Batch:
    """The batch with the drafter's own text at these places. Of their documents nothing after it is wanted, nor after
    an end of text that it wrote."""
    if not places:
        return batch
    ids, wanted = batch.ids.copy(), batch.wanted.copy()
    prompts = [batch.ids[p.row, p.start : p.begin].tolist() for p in places]
    texts = written(drafter, prompts, [p.end - p.begin for p in places])
    for p, text in zip(places, texts, strict=True):
        length = next((n for n, token in enumerate(text, 1) if token in eos_ids), len(text))
        ids[p.row, p.begin : p.end] = text
        wanted[p.row, p.begin :] &= batch.segments[p.row, p.begin :] != batch.segments[p.row, p.start]
        wanted[p.row, p.begin : p.begin + length] = True
    return replace(batch, ids=ids, wanted=wanted)


def written(drafter: Drafter, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """What the drafter writes after each prompt, greedily and without activations, so many tokens each."""
    capacity, scratch = max(map(len, prompts)), max(counts)
    drafting = MoaDrafting(drafter, slots=len(prompts), capacity=capacity, scratch=scratch, alone=True)
    requests = []
    # In its own precision, as it is used. Older autocasts would also keep their copies of the weights, which have no
    # gradient here, for the loss.
    with torch.autocast(drafting.device.type, enabled=False):
        for prompt, count in zip(prompts, counts, strict=True):
            slot = drafting.open()
            drafting.read(slot, prompt[:-1])
            shape = TreeShape.chain(count, min_score=float("-inf"))
            requests.append(DraftRequest(slot, prompt[-1], shape, SamplingSettings()))
        return [tree.tokens[1:] for tree in drafting.draft(requests)]
