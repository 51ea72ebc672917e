"""Training text as packed rows on disk: written once, read by memory map, so memory stays flat at any size.

A row holds whole documents side by side (`segments` says which), each with its own positions and its own attention.
The batch of a step is a fixed function of (seed, step), so a resumed run and a run over more processes see the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moa.errors import UsageError

OPEN_ROWS = 16
"""Rows filled at a time: enough that the last gap of a row nearly always finds a document that fits."""


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them the model is asked to predict (an answer's, not its prompt's)."""

    ids: list[int]
    wanted: list[bool]

    @classmethod
    def text(cls, ids: list[int]) -> Document:
        """A document without a prompt."""
        return cls(ids, [True] * len(ids))

    @classmethod
    def answer(cls, prompt: list[int], answer: list[int]) -> Document:
        """A prompt and what follows it."""
        return cls(prompt + answer, [False] * len(prompt) + [True] * len(answer))


@dataclass(frozen=True)
class Batch:
    """Rows of `[B, L]`: ids, segment numbers from 1 (0 is padding), positions in the document, wanted tokens."""

    ids: NDArray[np.int64]
    segments: NDArray[np.int64]
    positions: NDArray[np.int64]
    wanted: NDArray[np.bool_]
    rows: NDArray[np.int64]
    """Which rows of the data these are, for noise that depends on the row and not on who holds it."""


class PackedRows:
    """Rows on disk: `tokens.npy` and `marks.npy` (segment number, negative where the token is not wanted)."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
            self._marks = np.load(folder / "marks.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UsageError(f"no packed training data in {folder}: {error}") from None
        if self._tokens.shape != self._marks.shape or self._tokens.ndim != 2:
            raise UsageError(f"the packed training data in {folder} is damaged", hint="delete the folder")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return int(self._tokens.shape[1])

    @property
    def wanted_tokens(self) -> int:
        """Tokens with a loss, in all rows."""
        return int((np.asarray(self._marks) > 0).sum())

    def batch(self, seed: int, step: int, size: int, *, rank: int = 0, world: int = 1) -> Batch:
        """This rank's share of the `size * world` rows of a step; every epoch is a new permutation."""
        places = np.arange(step * size * world + rank, (step + 1) * size * world, world)
        epochs, offsets = np.divmod(places, len(self))
        rows = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([seed, int(epoch)]).permutation(len(self))
            rows[epochs == epoch] = order[offsets[epochs == epoch]]
        return self.rows(rows)

    def rows(self, rows: NDArray[np.int64]) -> Batch:
        """Chosen rows as a batch."""
        marks = self._marks[rows].astype(np.int64)
        segments = np.abs(marks)
        start = np.concatenate([np.ones((len(rows), 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
        positions = index - np.maximum.accumulate(np.where(start, index, 0), axis=1)
        return Batch(self._tokens[rows].astype(np.int64), segments, positions, marks > 0, rows)


def pack(documents: Iterable[Document], length: int, out: Path) -> PackedRows:
    """Write documents as rows of `length`; a document that is longer goes on in the next row."""
    tokens: list[NDArray[np.int32]] = []
    marks: list[NDArray[np.int16]] = []
    for row_ids, row_marks in _fill(_pieces(documents, length), length):
        tokens.append(np.array(row_ids + [0] * (length - len(row_ids)), dtype=np.int32))
        marks.append(np.array(row_marks + [0] * (length - len(row_marks)), dtype=np.int16))
    if not tokens:
        raise UsageError("the training data is empty: no document has two tokens or more")
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "tokens.npy", np.stack(tokens))
    np.save(out / "marks.npy", np.stack(marks))
    return PackedRows(out)


def _pieces(documents: Iterable[Document], length: int) -> Iterator[Document]:
    for document in documents:
        for at in range(0, len(document.ids), length):
            piece = Document(document.ids[at : at + length], document.wanted[at : at + length])
            if len(piece.ids) > 1 and any(piece.wanted[1:]):
                yield piece


def _fill(pieces: Iterable[Document], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """First fit over a few open rows; the fullest leaves when a piece fits none."""
    rows: list[tuple[list[int], list[int]]] = []
    for piece in pieces:
        row = next((r for r in rows if len(r[0]) + len(piece.ids) <= length), None)
        if row is None:
            if len(rows) == OPEN_ROWS:
                fullest = max(rows, key=lambda r: len(r[0]))
                rows.remove(fullest)
                yield fullest
            row = ([], [])
            rows.append(row)
        segment = abs(row[1][-1]) + 1 if row[1] else 1
        row[0].extend(piece.ids)
        row[1].extend(segment if wanted else -segment for wanted in piece.wanted)
    yield from rows
