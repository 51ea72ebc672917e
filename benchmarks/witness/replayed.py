"""A target, and drafters beside it, that read recorded texts instead of computing: verdicts,
states, keys and values are those of the real model (`python -m benchmarks.witness heldout`), and a
forward costs next to nothing. So any time of a forward can be emulated on a small machine, with the
drafts and the acceptance of a real language model.

Only greedy texts are known. Nodes beside the text have states of zeros: no verdict goes through
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines.registry import load_any
from benchmarks.drafters.witness import row_of, states_of
from benchmarks.witness.rows import heldout_folders
from moa.drafters.contract import DraftRequest
from moa.target.decoder import Forward
from moa.target.rows import RowBatch
from moa.target.torch_target import Committed, Row, Step, Target
from moa.training.teacher_files import read_output, written
from moa.tree import DraftTree


@dataclass(frozen=True)
class Recorded:
    """A prompt, the target's answer, and where it is with all that was computed on it."""

    kind: str
    prompt: list[int]
    answer: list[int]
    place: Path
    row: int
    first: int

    @cached_property
    def ids(self) -> list[int]:
        """All of it, and a token that ends it."""
        return [*self.prompt, *self.answer, 0]

    @cached_property
    def lesson(self) -> dict[str, Tensor]:
        """Keys, values and states, read when they are first asked for."""
        span = slice(self.first, self.first + len(self.ids) - 1)
        found = read_output(self.place, self.row)
        return {
            name: (part[:, span] if name in ("keys", "values") else part[span]).float()
            for name, part in found.items()
        }


def recorded(folder: Path, most: int | None = None) -> list[Recorded]:
    """So many greedy texts of a folder, of every kind in turn."""
    kinds = [
        _texts(kind, place)
        for kind, temperature, place in heldout_folders(folder)
        if not temperature
    ]
    return list(islice((text for text in chain(*zip_longest(*kinds)) if text is not None), most))


def _texts(kind: str, place: Path) -> Iterator[Recorded]:
    rows = written(place)
    for number in range(len(rows)):
        batch = rows.rows(np.array([number]))
        for document in range(1, int(batch.segments.max()) + 1):
            (inside,) = (batch.segments[0] == document).nonzero()
            ids = batch.ids[0, inside].tolist()
            cut = int(batch.wanted[0, inside].argmax())
            if cut:
                yield Recorded(kind, ids[:cut], ids[cut:], place, number, int(inside[0]))


class ReplayedTarget(Target):
    """The target of recorded texts; without any it computes."""

    def __init__(self, *arguments: Any, texts: Sequence[Recorded] = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._texts = texts
        self._of_page: dict[int, Recorded] = {}
        """By the first page of a slot: what is written there."""
        self._taps = False

    def tap(self, layers: Sequence[int]) -> None:
        """Give the low, middle and high states."""
        super().tap(layers)
        self._taps = True

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Step:
        """Look everything up."""
        if not self._texts:
            return super().forward(rows)
        batch = RowBatch.of(rows, self.facts.vocab_size)
        versions = self.cache.begin(batch.slots, batch.sizes)
        lengths = np.array([self.cache.lengths[slot] for slot in batch.slots])
        columns = torch.from_numpy(
            self.cache.columns(
                np.repeat(batch.slots, batch.sizes), np.repeat(lengths, batch.sizes) + batch.nodes
            )
        )
        width = self.head_weight.shape[1]
        hidden = torch.zeros(len(batch.ids), width)
        tapped = torch.zeros(len(batch.ids), 3 * width)
        choices = np.zeros(len(batch.ids), dtype=np.int64)
        for b, row in enumerate(rows):
            start = self.cache.lengths[row.slot]
            if (text := self._text(row, start)) is None:
                continue
            found = _on_text(row, start, text.ids)
            nodes = torch.tensor([*found]) + int(batch.starts[b])
            places = torch.tensor([*found.values()])
            hidden[nodes] = text.lesson["hidden"][places]
            tapped[nodes] = text.lesson["tapped"][places]
            choices[nodes] = np.array(text.ids)[places + 1]
            for memory, known in ((self.cache.k, "keys"), (self.cache.v, "values")):
                memory.index_copy_(1, columns[nodes], text.lesson[known][:, places])
        forward = Forward(
            hidden=hidden,
            tapped=tapped if self._taps else None,
            path="replayed",
            choices=choices,
        )
        return Step(self, batch, versions, forward)

    def _text(self, row: Row, start: int) -> Recorded | None:
        """The text that a row goes on with; none for the engine's warm-up."""
        page = int(self.cache.tables[row.slot, 0])
        sure = 1 if row.judged == "all" else len(row.tokens)
        known = [self._of_page[page]] if start and page in self._of_page else []
        for text in (*known, *self._texts):
            if text.ids[start : start + sure] == list(row.tokens[:sure]):
                self._of_page[page] = text
                return text
        return None


def _on_text(row: Row, start: int, ids: Sequence[int]) -> dict[int, int]:
    """By node that continues the text: its place."""
    found = {-1: start - 1}
    for node, (token, parent) in enumerate(zip(row.tokens, row.parents, strict=True)):
        place = found.get(parent, len(ids)) + 1
        if place < len(ids) - 1 and ids[place] == token:
            found[node] = place
    del found[-1]
    return found


Chains = dict[tuple[int, ...], list[tuple[list[int], list[float]]]]
"""By prompt, from its last token on: of each pending token the guesses and their log-probabilities."""


@torch.inference_mode()
def known_chains(folder: Path, target: Target, texts: Sequence[Recorded], depth: int) -> Chains:
    """What a drafter in step guesses. Behind a wrong guess the others are as if it had been right:
    no verdict reaches them."""
    model = load_any(folder, target.model, target.facts)
    found = {}
    for text in texts:
        row = row_of(target.model, getattr(model.config, "taps", ()), text.place, text.row)
        starts = torch.arange(len(text.answer)) + text.first + len(text.prompt) - 1
        states = states_of(model, row, starts, "0", depth)
        likely = [target.logits(hidden).log_softmax(-1).max(-1) for hidden in states]
        guesses = torch.stack([best.indices for best in likely], 1)
        scores = torch.stack([best.values for best in likely], 1).cumsum(1)
        found[tuple(text.prompt)] = list(zip(guesses.tolist(), scores.tolist(), strict=True))
    return found


class ReplayedDrafting:
    """A server's drafter whose chains are known; a level takes `level_seconds`."""

    def __init__(self, chains: Chains, *, level_seconds: float) -> None:
        self._chains = chains
        self._level_seconds = level_seconds
        self.read: dict[int, list[int]] = {}
        """By slot: the text so far, but for its pending token."""

    @property
    def free(self) -> bool:
        """There is always another slot."""
        return True

    def known(self, slot: int) -> int:
        """How much of its text a slot has."""
        return len(self.read[slot])

    def open(self) -> int:
        """Take a slot."""
        slot = next(n for n in range(len(self.read) + 1) if n not in self.read)
        self.read[slot] = []
        return slot

    def close(self, slot: int) -> None:
        """Give it back."""
        del self.read[slot]

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """The target has run these tokens."""
        self.read[slot] = [*self.read[slot], *tokens]

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The chains after these pending tokens."""
        time.sleep(self._level_seconds * max(request.shape.depth for request in requests))
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> DraftTree:
        log = [*self.read[request.slot], request.pending]
        prompt, chains = next(
            (prompt, one)
            for prompt, one in self._chains.items()
            if tuple(log[: len(prompt)]) == prompt
        )
        guesses, scores = chains[len(log) - len(prompt)]
        count = 1 + sum(score >= request.shape.least for score in scores[1 : request.shape.depth])
        return DraftTree(
            [request.pending, *guesses[:count]], list(range(-1, count)), [0.0, *scores[:count]]
        )
