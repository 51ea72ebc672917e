"""Training text as packed rows on disk: written once, read by memory map, so memory stays flat at
any size.

A row holds whole documents side by side (`segments` says which), each with its own positions and
its own attention. The batch of a step is a fixed function of (seed, step), so a resumed run and a
run over more processes see the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moa.errors import UsageError

_ROWS_AT_ONCE = 1024
"""Rows that are counted at a time."""
OPEN_ROWS = 16
"""Rows filled at the same time: enough to nearly always find a document that fits the last gap of a
row."""


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them the model is asked to predict (an answer's, not its prompt's)."""

    ids: list[int]
    wanted: list[bool]

    @classmethod
    def text(cls, ids: list[int]) -> Document:
        """A document without a prompt."""
        return cls(ids, [True] * len(ids))

    def prompt(self, text_tokens: int) -> list[int]:
        """The tokens before the first one that is to be learnt (wanted): the document's prompt. Of
        a text without a prompt its first `text_tokens`."""
        if not any(self.wanted):
            return list(self.ids)
        prompt_tokens = self.wanted.index(True)
        if prompt_tokens == 0:
            prompt_tokens = text_tokens
        return self.ids[:prompt_tokens]

    @classmethod
    def answer(cls, prompt: list[int], answer: list[int]) -> Document:
        """A prompt and its answer."""
        return cls(prompt + answer, [False] * len(prompt) + [True] * len(answer))


@dataclass(frozen=True)
class Batch:
    """Rows of `[B, L]`: ids, segment numbers from 1 (0 is padding), positions in the document,
    wanted tokens."""

    ids: NDArray[np.int64]
    segments: NDArray[np.int64]
    positions: NDArray[np.int64]
    wanted: NDArray[np.bool_]
    rows: NDArray[np.int64]
    """Indices of these rows in the data: noise depends on the row, not on the process that has it."""


class PackedRows:
    """Rows on disk: `tokens.npy` and `marks.npy` (segment number, negative where the token is not
    wanted)."""

    def __init__(self, folder: Path) -> None:
        """Open the rows that `pack` wrote into a folder. They are mapped: what is not looked at
        takes no memory."""
        try:
            self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
            self._marks = np.load(folder / "marks.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"no packed training data in {folder}: {error}") from None
        if self._tokens.shape != self._marks.shape or self._tokens.ndim != 2:
            raise UsageError(
                f"the packed training data in {folder} is damaged", hint="delete the folder"
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def first(self, count: int) -> Self:
        """The first rows alone, so many of them."""
        part = copy.copy(self)
        part._tokens = self._tokens[:count]
        part._marks = self._marks[:count]
        return part

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return int(self._tokens.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(np.count_nonzero(self._marks))

    @property
    def wanted_tokens(self) -> int:
        """Tokens with a loss, in all rows."""
        return int((np.asarray(self._marks) > 0).sum())

    def counts(self, vocabulary: int) -> NDArray[np.int64]:
        """How often each token occurs."""
        counts = np.zeros(vocabulary, np.int64)
        for start in range(0, len(self), _ROWS_AT_ONCE):
            tokens = np.asarray(self._tokens[start : start + _ROWS_AT_ONCE])
            marks = np.asarray(self._marks[start : start + _ROWS_AT_ONCE])
            is_padding = marks == 0
            counts += np.bincount(tokens[~is_padding], minlength=vocabulary)
        return counts

    def batch(self, seed: int, step: int, size: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The batch of a step for this process, number `rank` of `world`: `size` rows out of the
        `size * world` rows of the step. Rows are drawn without repetition until all have been seen,
        an epoch, and then in another order. It depends on nothing but the arguments."""
        rows_of_a_step = size * world
        # Numbers of rows as they are drawn, all epochs one after another.
        numbers = np.arange(step * rows_of_a_step + rank, (step + 1) * rows_of_a_step, world)
        epochs, places = np.divmod(numbers, len(self))
        rows = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng([seed, int(epoch)]).permutation(len(self))
            is_of_epoch = epochs == epoch
            rows[is_of_epoch] = order[places[is_of_epoch]]
        return self.rows(rows)

    def rows(self, rows: NDArray[np.int64]) -> Batch:
        """The rows with these numbers as a batch. Each document in a row has positions of its own,
        from 0 on."""
        marks = self._marks[rows].astype(np.int64)
        segments = np.abs(marks)
        is_first = np.ones(segments.shape, dtype=bool)
        is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
        index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
        document_start = np.maximum.accumulate(np.where(is_first, index, 0), axis=1)
        return Batch(
            ids=self._tokens[rows].astype(np.int64),
            segments=segments,
            positions=index - document_start,
            wanted=marks > 0,
            rows=rows,
        )


def pack(documents: Iterable[Document], length: int, out: Path) -> PackedRows:
    """Write documents into `out` as packed rows of `length` tokens, several documents side by side
    in a row; a longer document is cut into several."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        _RowFile(out / "tokens.npy", length, np.int32) as tokens,
        _RowFile(out / "marks.npy", length, np.int16) as marks,
    ):
        for row_ids, row_marks in _fill(pieces(documents, length), length):
            tokens.append(row_ids)
            marks.append(row_marks)
        if not tokens.rows:
            raise UsageError(
                "the files of --data hold nothing to learn: no answer, and no text of two tokens"
            )
    return PackedRows(out)


class _RowFile:
    """An `.npy` file that grows by rows; it gets its final name when it is complete."""

    def __init__(self, path: Path, length: int, dtype: type[np.signedinteger]) -> None:
        self.path = path
        self.length = length
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._part = path.with_suffix(".part")
        self._file = self._part.open("wb")
        self._write_header()

    def append(self, values: list[int]) -> None:
        """One more row, padded with zeros."""
        row = np.zeros(self.length, dtype=self.dtype)
        row[: len(values)] = values
        self._file.write(row.tobytes())
        self.rows += 1

    def _write_header(self) -> None:
        """Write the header of an `.npy` file, which says how many rows there are: at the beginning
        none, and all at the end."""
        # numpy pads the header, so that a larger number fits into it later.
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.rows, self.length),
        }
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self._write_header()
        with self._file:  # closes the file even if the disk is full
            self._file.flush()
        if kind is None:
            self._part.replace(self.path)
        else:
            self._part.unlink(missing_ok=True)


def pieces(documents: Iterable[Document], length: int) -> Iterator[Document]:
    """Yield the documents, a longer one than `length` cut into several. Pieces without a token that
    is to be learnt from one before it are left out."""
    for document in documents:
        for start in range(0, len(document.ids), length):
            stop = start + length
            piece = Document(document.ids[start:stop], document.wanted[start:stop])
            if len(piece.ids) > 1 and any(piece.wanted[1:]):
                yield piece


def _fill(pieces: Iterable[Document], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids and marks of each packed row: a mark is the number of the token's document in
    its row, negative where the token is not to be learnt. A piece goes into the first of a few open
    rows that has room for it; if none has, the fullest row is complete, and a new one is begun."""
    open_rows: list[_Row] = []
    for piece in pieces:
        row = _with_room(open_rows, length - len(piece.ids))
        if row is None:
            if len(open_rows) == OPEN_ROWS:
                fullest = max(open_rows, key=lambda row: len(row.ids))
                open_rows.remove(fullest)
                yield fullest.ids, fullest.marks
            row = _Row()
            open_rows.append(row)
        row.add(piece)
    for row in open_rows:
        yield row.ids, row.marks


def _with_room(rows: Iterable[_Row], most_held: int) -> _Row | None:
    """The first row that holds no more tokens than this."""
    for row in rows:
        if len(row.ids) <= most_held:
            return row
    return None


@dataclass(eq=False)
class _Row:
    """A row that is being filled."""

    ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    """For each token its segment, negative where it is not wanted."""
    segments: int = 0

    def add(self, piece: Document) -> None:
        """Add a piece as the next segment."""
        self.segments += 1
        self.ids += piece.ids
        self.marks += [self.segments if wanted else -self.segments for wanted in piece.wanted]
