"""The device's graph along texts that are known: what it would write by itself from several places
of an answer, and what it would guess at every place.

Both run many tokens a step, which a device that waits for each token cannot. The graph, its weights
and its threads are the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa.bundle import Bundle
from moa.errors import UsageError
from moa.graph.cache import KVBuffer
from moa.graph.load import LoadedGraph
from moa.graph.step import Call
from moa.sampling import SamplingSettings, gumbel
from moa.tree import MASKED, additive

TOP = 4
"""Guesses that are kept of a place."""
_PIECE = 64
"""Tokens of a known text in a step."""
_GUESSED = 16
"""The same where each is followed by a guess: a sampled one has noise for the whole vocabulary."""


class Guesses(NamedTuple):
    """The likeliest tokens at a place, the best first, and their log-probabilities."""

    tokens: list[int]
    logp: list[float]


@dataclass
class Branch:
    """A text that goes on from a place of the known one."""

    start: int
    """Tokens of the known text before its own."""
    log: list[int]
    rows: list[int] = field(default_factory=list)
    """Where its own tokens are in the cache."""
    ended: bool = False

    @property
    def own(self) -> list[int]:
        """What it has written."""
        return self.log[self.start :]


class Sibling:
    """A bundle's graph with a cache of its own."""

    def __init__(self, bundle: Path, *, threads: int = 0) -> None:
        loaded = LoadedGraph.load(Bundle.open(bundle), threads=threads)
        if loaded.draft_tokens is not None:
            raise UsageError(f"{bundle} guesses a part of the vocabulary only: it is no sibling")
        if loaded.graph.states:
            raise UsageError(f"{bundle} keeps running states: it cannot go on from several places")
        self.graph = loaded.graph
        self.variant = loaded.variant
        self.eos = frozenset(loaded.bundle.manifest.tokenizer.eos_ids)
        self.vocabulary = loaded.bundle.manifest.vocabulary.target
        self._silence = np.zeros((1, 1, 1), np.float32)
        self._prompt: list[int] = []
        self._rows = KVBuffer(self.graph.cache)
        """Of this prompt, and what was read behind it."""

    def continuations(
        self, text: Sequence[int], starts: Sequence[int], ended: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """What it writes by itself, greedily, behind `text[:start]` for every start, side by side;
        a branch ends with the end of text, or where `ended` says so of all of its text."""
        rows = KVBuffer(self.graph.cache)
        base = max(starts) - 1
        self._read(rows, text[:base])
        branches = [Branch(start, list(text[:start])) for start in starts]
        used = base
        while alive := [one for one in branches if not one.ended]:
            rows.reserve(used + len(alive))
            call = Call(self.graph, len(alive), cache=rows.arrays, records={}, text=False)
            for at, one in enumerate(alive):
                call.ids[0, at] = one.log[-1]
                call.positions[0, at] = len(one.log) - 1
                call.mask[0, 0, at, : one.start - 1] = 0
                call.mask[0, 0, at, one.rows] = 0
                one.rows.append(used + at)
            call.run(self._silence)
            rows.put(used, call.rows)
            used += len(alive)
            for at, one in enumerate(alive):
                token = int(call.top_tokens[0, at, 0])
                one.log.append(token)
                one.ended = token in self.eos or ended(one.log)
        return [one.own for one in branches]

    def guesses(self, text: Sequence[int], start: int, sampling: SamplingSettings) -> list[Guesses]:
        """The guesses after each token from `start - 1` on, where all before it is right."""
        known = list(text[: start - 1])
        if self._prompt != known:  # else another answer to the same prompt was the last one
            self._rows = KVBuffer(self.graph.cache)
            self._read(self._rows, known)
            self._prompt = known
        rows = self._rows
        found: list[Guesses] = []
        for at in range(start - 1, len(text) - 1, _GUESSED):
            piece = text[at : min(at + _GUESSED, len(text) - 1)]
            call = self._along(rows, piece, at, text=False)
            call.scale[0] = 1.0 if sampling.greedy else 1.0 / sampling.temperature
            call.run(self._noise(sampling, range(at + 1, at + 1 + len(piece))))
            rows.put(at, call.rows)
            for tokens, logp in zip(call.top_tokens[0], call.top_logp[0], strict=True):
                found.append(Guesses(tokens[:TOP].tolist(), logp[:TOP].tolist()))
        return found

    def _read(self, rows: KVBuffer, text: Sequence[int]) -> None:
        """Compute the rows of a known text."""
        for at in range(0, len(text), _PIECE):
            call = self._along(rows, text[at : at + _PIECE], at, text=True)
            call.run(self._silence)
            rows.put(at, call.rows)

    def _along(self, rows: KVBuffer, piece: Sequence[int], at: int, *, text: bool) -> Call:
        """A step over tokens of which each follows the one before it."""
        rows.reserve(at + len(piece))
        call = Call(self.graph, len(piece), cache=rows.arrays, records={}, text=text)
        call.ids[0] = piece
        call.positions[0] = np.arange(at, at + len(piece))
        call.mask[...] = MASKED
        call.mask[..., :at] = 0
        call.mask[0, 0, :, -len(piece) :] = additive(np.tri(len(piece), dtype=np.bool_))
        return call

    def _noise(self, sampling: SamplingSettings, positions: Sequence[int]) -> NDArray[np.float32]:
        if sampling.greedy:
            return self._silence
        drawn = [gumbel(sampling.seed, position, self.vocabulary) for position in positions]
        return np.stack(drawn)[None].astype(np.float32)
