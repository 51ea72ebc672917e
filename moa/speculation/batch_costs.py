"""What a batch of texts costs, by parts and sizes, learned from the batches that ran. Pure: the caller measures.

The forward is known by its tokens, whoever they belong to, and drafting by the number of texts that draft together. So
what was measured with few texts, or while prompts were read, says what a draft costs among many. Nothing is assumed of
the shape of these curves: a mixture of experts reads more weights with every token, an accelerator hardly more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import accumulate
from math import log2, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LATEST = 31
"""The latest measurements of a size that count: those below two thirds of them, because other load makes single ones
slow, and none fast. Of up to three it is the fastest: too high a cost would never be measured again."""
_FINE = 2
"""Sizes are told apart by the powers of two, and so many steps between them."""
_EXACT, _KERNELS = 16, 8
"""Sizes up to the first are each a size of their own; above it, that many between two powers of two."""
_FIRSTS = 4
"""Drafts of one level before any of more: the first does not count, and others may be slow by chance."""
_CREDIT = 12.0
"""Plain rounds that drafting may lose against what was estimated, before it is off until plain decoding has made up for
it: times of a busy machine are noisy, and an estimate that is wrong by luck stays wrong for a while. The more texts
share a round, the less is luck: among n of them it is less by the root of n."""
_EARNED = 0.005
"""What a plain round adds to the credit."""
_OUTLIER = 2.0
"""A round counts as at most so many times its usual time: a machine that slept says nothing of drafting."""
_SLOW, _SLOW_DRAFTED = 0.98, 0.95
"""Weight of the past in the slow means of how much longer rounds take than is typical of their parts: of plain ones,
and of those with drafts."""

Floats = NDArray[np.float64]


class Typical:
    """What two thirds of the latest measurements exceed, kept in order as they come."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque()
        """The oldest first."""
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        """One measurement more; the oldest goes."""
        if len(self.latest) == _LATEST:
            del self._ordered[bisect_left(self._ordered, self.latest.popleft())]
        self.latest.append(value)
        insort(self._ordered, value)

    @property
    def value(self) -> float:
        """Nothing before any was measured."""
        return self._ordered[(len(self._ordered) - 1) // 3] if self._ordered else 0.0

    def __len__(self) -> int:
        return len(self.latest)


class Curve:
    """Seconds by size: what is typical of like sizes, straight lines between them. Nothing larger is ever cheaper.

    Learned from and asked in every round, and a round of a small target is only a few milliseconds: so the line is
    drawn again only when one of them has moved, and a single size needs no arrays."""

    def __init__(self) -> None:
        self._met: set[float] = set()
        self._seen: dict[int, tuple[Typical, Typical]] = {}
        self._points: dict[int, tuple[float, float]] = {}
        self._sizes, self._seconds = [0.0], [0.0]

    def add(self, size: float, seconds: float) -> None:
        """So much took so long."""
        # The first of a size also makes kernels, or finds nothing in the caches. Kernels are for about an eighth.
        about = size if size <= _EXACT else round(_KERNELS * log2(size))
        if about not in self._met:
            self._met.add(about)
            return
        group = round(_FINE * log2(size))
        sizes, times = self._seen.setdefault(group, (Typical(), Typical()))
        sizes.add(size)
        times.add(seconds)
        if (point := (sizes.value, times.value)) != self._points.get(group):
            self._points[group] = point
            self._draw()

    def _draw(self) -> None:
        points = sorted(self._points.values())
        self._sizes, self._seconds = [s for s, _ in points], list(accumulate((t for _, t in points), max))

    def at(self, size: ArrayLike) -> Floats:
        """Seconds of these sizes; 0 before anything was measured. Beyond the largest, as steep as on average."""
        sizes, seconds = self._sizes, self._seconds
        wanted = np.asarray(size, dtype=np.float64)
        found: Floats = np.interp(wanted, sizes, seconds) + self._steep * np.maximum(0.0, wanted - sizes[-1])
        return found

    def of(self, size: float) -> float:
        """The same of one size."""
        sizes, seconds = self._sizes, self._seconds
        if size >= sizes[-1]:
            return seconds[-1] + self._steep * (size - sizes[-1])
        after = bisect_right(sizes, size)
        if not after:
            return seconds[0]
        share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])

    @property
    def largest(self) -> int:
        """The largest size that was measured."""
        return int(self._sizes[-1])

    @property
    def _steep(self) -> float:
        run = self._sizes[-1] - self._sizes[0]
        return (self._seconds[-1] - self._seconds[0]) / run if run > 0 else 0.0

    def __bool__(self) -> bool:
        return bool(self._points)


class BatchRun(NamedTuple):
    """What a batch took. Texts that draft are among its `texts`; other work may be among its `tokens`."""

    texts: int
    tokens: int
    """Of the target's forward."""
    won: int
    """Tokens that the texts gained."""
    forward_seconds: float
    drafting: int = 0
    """Texts that drafted."""
    steps: int = 0
    """Levels that the drafter ran for them, one after another."""
    drafted: int = 0
    """Nodes of our drafts among the forward's tokens."""
    draft_seconds: float = 0.0
    """Without what the drafter had to read of earlier rounds."""
    rest_seconds: float = 0.0


class BatchCosts:
    """Seconds of a round's parts, and whether drafting has kept what they promised."""

    def __init__(self) -> None:
        self.forward, self.first, self.step, self.rest = Curve(), Curve(), Curve(), Curve()
        """By the forward's tokens; a draft's first level, with all that goes before it, and each further one, by the
        texts that draft; by the texts."""
        self.reading = Typical()
        """Seconds a token of text that the drafter had missed."""
        self.since = 0.0
        """Seconds of plain decoding since the latest draft."""
        self.rounds = 0
        """With texts in them; others run prompts alone."""
        self.credit = _CREDIT
        """Plain rounds that drafting may still lose."""
        self._firsts = 0
        """Drafts of one level."""
        self._longer, self._drafted_longer = 1.0, 1.0

    @property
    def longer(self) -> float:
        """By how much a round with drafts exceeds what is typical of its parts, beside a plain one: it has more parts
        that can be late."""
        return max(1.0, self._drafted_longer / self._longer)

    def add(self, ran: BatchRun, stands_for: int = 1, *, usual: bool = True) -> None:
        """Learn from a round; a plain one may be an example of several. One that is not `usual` says nothing of the
        times of others."""
        if usual:
            self.forward.add(ran.tokens, ran.forward_seconds)
        if ran.drafting and ran.steps:
            if ran.steps == 1:
                self._firsts += 1
                self.first.add(ran.drafting, ran.draft_seconds)
            elif self.first:
                more = max(0.0, ran.draft_seconds - self.first.of(ran.drafting))
                self.step.add(ran.drafting, more / (ran.steps - 1))
        if not ran.texts:
            return
        self.rounds += stands_for
        if usual:
            self.rest.add(ran.texts, ran.rest_seconds)
        seconds = ran.draft_seconds + ran.forward_seconds + ran.rest_seconds
        plain = self.plain(ran.texts, ran.tokens - ran.drafted)
        if not ran.drafting:
            self.since += stands_for * seconds
            self.credit = min(_CREDIT, self.credit + stands_for * sqrt(ran.texts) * _EARNED)
            if plain > 0:
                self._longer = _SLOW * self._longer + (1 - _SLOW) * min(_OUTLIER, seconds / plain)
            return
        self.since = 0.0
        expected = (
            plain
            + float(self.draft(ran.drafting, ran.steps))
            + self.forward.of(ran.tokens)
            - self.forward.of(ran.tokens - ran.drafted)
        )
        if plain > 0:
            ratio = min(_OUTLIER, seconds / expected)
            self._drafted_longer = _SLOW_DRAFTED * self._drafted_longer + (1 - _SLOW_DRAFTED) * ratio
            lost = ratio * expected / (self._longer * plain)
            self.credit = min(_CREDIT, self.credit + sqrt(ran.texts) * (ran.won / ran.texts - lost))

    @property
    def drafted(self) -> bool:
        """Whether some drafts of one level were measured, beside which others are known."""
        return bool(self.first) and self._firsts >= _FIRSTS

    def level(self, texts: float) -> float:
        """Seconds of a further level for so many texts: less than those of the first, which does as much and more."""
        first = self.first.of(texts)
        return min(first, self.step.of(texts)) if self.step else first

    def draft(self, texts: ArrayLike, steps: ArrayLike) -> Floats:
        """Seconds of a draft of so many levels for so many texts."""
        first = self.first.at(texts)
        each = np.minimum(first, self.step.at(texts)) if self.step else first
        return first + (np.asarray(steps, dtype=np.float64) - 1.0) * each

    def plain(self, texts: int, tokens: int) -> float:
        """Seconds of a round of so many texts without drafts, with so many tokens in its forward."""
        return self.forward.of(tokens) + self.rest.of(texts)

    def read(self, seconds: float, tokens: int) -> None:
        """The drafter read so many tokens of text, of rounds that it had no part in."""
        self.reading.add(seconds / tokens)

    @property
    def price(self) -> float:
        """Seconds of reading a token; nothing before any was measured."""
        return self.reading.value
