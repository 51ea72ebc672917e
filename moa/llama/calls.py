"""How the rows of a forward are cut into calls of llama.cpp's library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FILL = 0
"""The token that fills a call up. Nobody reads what comes after it."""
_WORTH_A_CALL = 8
"""A call costs about as much as so many tokens: a row is filled up by fewer rather than leave
another row's rest for a call of its own."""


class Pieces(NamedTuple):
    """One row of a forward: all tokens that its sequence has to run."""

    row: int
    sequence: int
    start: int
    """Position of the first token."""
    tokens: Sequence[int]
    skipped: int
    """Tokens before the row's node 0: committed ones that are run again."""
    judged: Sequence[int]
    """Nodes of which logits are wanted."""


class Part(NamedTuple):
    """What of a row a call runs."""

    row: int
    sequence: int
    start: int
    tokens: Sequence[int]
    first: int
    """The row's node that is the first token here; negative before node 0."""
    judged: Sequence[int]
    """Places in `tokens` of which logits are wanted."""


@dataclass(frozen=True)
class Calls:
    """The rule: every sequence of a call brings the same number of tokens, a multiple of `unit` and
    at most `longest`; a call has at most `batch`. llama.cpp then runs it at once, as it is."""

    unit: int
    longest: int
    batch: int
    block: Callable[[int], int]
    """Which context a sequence is in: a call runs sequences of one."""

    def of(self, rows: Sequence[Pieces]) -> Iterator[list[Part]]:
        """The calls that run these rows, each in order."""
        for group in self._groups(sorted(rows, key=lambda row: row.sequence)):
            yield from self._calls(group)

    def _groups(self, rows: Sequence[Pieces]) -> Iterator[list[Pieces]]:
        """Rows whose sequences follow each other, as many as a call holds: llama.cpp runs no others
        at once."""
        group: list[Pieces] = []
        for row in rows:
            follows = bool(group) and row.sequence == group[-1].sequence + 1
            follows = follows and self.block(row.sequence) == self.block(group[-1].sequence)
            if group and (not follows or (len(group) + 1) * self.unit > self.batch):
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def _calls(self, rows: Sequence[Pieces]) -> Iterator[list[Part]]:
        lengths = self._padded([len(row.tokens) for row in rows])
        done = 0
        while running := [i for i, length in enumerate(lengths) if length > done]:
            room = self.batch // len(running) // self.unit * self.unit
            size = min(self.longest, room, min(lengths[i] for i in running) - done)
            for together in _neighbours(running):
                yield [self._part(rows[i], done, size) for i in together]
            done += size

    def _padded(self, lengths: Sequence[int]) -> list[int]:
        """Multiples of the unit, and those that are nearly as long as the longest as long as it."""
        whole = [-(-length // self.unit) * self.unit for length in lengths]
        longest = max(whole)
        return [longest if longest - length <= _WORTH_A_CALL else length for length in whole]

    def _part(self, row: Pieces, done: int, size: int) -> Part:
        tokens = list(row.tokens[done : done + size])
        tokens += [_FILL] * (size - len(tokens))
        first = done - row.skipped
        return Part(
            row=row.row,
            sequence=row.sequence,
            start=row.start + done,
            tokens=tokens,
            first=first,
            judged=[node - first for node in row.judged if first <= node < first + size],
        )


def _neighbours(places: Sequence[int]) -> Iterator[list[int]]:
    """Runs of numbers that follow each other."""
    run: list[int] = []
    for place in places:
        if run and place != run[-1] + 1:
            yield run
            run = []
        run.append(place)
    if run:
        yield run
