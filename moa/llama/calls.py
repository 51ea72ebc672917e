"""How the rows of a forward are cut into calls of llama.cpp's library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FILL = 0
"""The token that fills a call up. Nobody reads what comes after it."""


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
    worth_a_call: int = 8
    """A call costs about as much as so many tokens: a row is filled up by at most so many rather
    than leave another row's rest for a call of its own."""

    def of(self, rows: Sequence[Pieces]) -> Iterator[list[Part]]:
        """The calls that run these rows, each in order."""
        for group in self._groups(sorted(rows, key=lambda row: row.sequence)):
            yield from self._calls(group)

    def _groups(self, rows: Sequence[Pieces]) -> Iterator[list[Pieces]]:
        """Group rows that one call of llama.cpp can run, at most as many as it holds: their
        sequences are in one context, and have consecutive numbers there. The rows come sorted by
        these."""
        group: list[Pieces] = []
        for row in rows:
            if group:
                last = group[-1].sequence
                follows = row.sequence == last + 1
                same_block = self.block(row.sequence) == self.block(last)
                fits = (len(group) + 1) * self.unit <= self.batch
                if not (follows and same_block and fits):
                    yield group
                    group = []
            group.append(row)
        if group:
            yield group

    def _calls(self, rows: Sequence[Pieces]) -> Iterator[list[Part]]:
        """Cut a group of rows into calls, in each of which every row has the same number of tokens:
        llama.cpp runs only such calls at once. All rows go on together, by as many tokens as the
        shortest of those that are not done has left, and as a call may have."""
        lengths = self._padded([len(row.tokens) for row in rows])
        done = 0  # tokens of each row that have been run
        while running := [index for index, length in enumerate(lengths) if length > done]:
            most_each = self.batch // len(running)
            most_each -= most_each % self.unit
            shortest_rest = min(lengths[index] for index in running) - done
            size = min(self.longest, most_each, shortest_rest)
            # Where a row in the middle is done, those on its two sides are no neighbours any more.
            for together in _consecutive(running):
                yield [self._part(rows[index], done, size) for index in together]
            done += size

    def _padded(self, lengths: Sequence[int]) -> list[int]:
        """The lengths of rows with the padding behind their tokens. They are multiples of the unit;
        a row that is nearly as long as the longest is made as long as it, which saves a call for
        the longest row's rest."""
        multiples = [math.ceil(length / self.unit) * self.unit for length in lengths]
        longest = max(multiples)
        padded = []
        for length in multiples:
            is_nearly_longest = longest - length <= self.worth_a_call
            padded.append(longest if is_nearly_longest else length)
        return padded

    def _part(self, row: Pieces, done: int, size: int) -> Part:
        """The part of a row that one call runs: `size` tokens behind the `done` first ones, with
        padding where the row has fewer left."""
        tokens = list(row.tokens[done : done + size])
        tokens += [_FILL] * (size - len(tokens))
        # Nodes are counted behind the `skipped` tokens of the text that the row runs again.
        first_node = done - row.skipped
        judged = []
        for node in row.judged:
            if first_node <= node < first_node + size:
                judged.append(node - first_node)
        return Part(
            row=row.row,
            sequence=row.sequence,
            start=row.start + done,
            tokens=tokens,
            first=first_node,
            judged=judged,
        )


def _consecutive(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Cut ascending numbers into runs in which each is one more than the one before it."""
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
