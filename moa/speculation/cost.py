"""What a forward costs: seconds by tokens, learned from the forwards that ran. Pure: no clock, no torch.

    cost = Cost(prior=0.005)             # seconds of the smallest size before anything was measured; 0.0: not known
    cost.observe(tokens, seconds, pairs)
    cost.seconds(tokens, pairs)

Used by all that plan by time: the verifier's scheduler (pieces of prompts between rounds), the speculation policy
(`moa.speculation.policy`) and the device's controller. Sizes need not be tokens of a forward: the policy also keeps the
seconds of a level of drafting by the number of texts, and the device those of a drafter's step by its width. A caller
whose prompts are long passes `attention_pairs` too; elsewhere they can be left out.

Nothing is assumed of the curve: a mixture of experts reads more weights with every token, an accelerator hardly more up
to some hundred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import log2

from moa.speculation.tuning import (
    FEW,
    GROUPS_PER_OCTAVE,
    LOADING,
    MARGIN,
    OUTLIER,
    WEIGHT_IF_FASTER,
    WEIGHT_IF_SLOWER,
)

_LEAST_SECONDS = 1e-9
"""A forward takes at least this, also by a clock that stands still: no estimate may be 0."""
_UNMEASURED_SLOPE = (MARGIN - 1) / FEW
"""Seconds of one more token, as a share of the forward's, until two sizes were measured: a few more
are too cheap to forbid that they are tried."""
_LEAST_EXPLAINED = 1 / FEW
"""The least share of the variance of samples of like size that query-key pairs must explain (r^2),
or the price of a pair is 0: short contexts would extrapolate noise to long ones."""


def attention_pairs(rows: Iterable[tuple[int, int]]) -> float:
    """Query-key pairs of a forward with rows of (tokens, context)."""
    return float(sum((tokens + LOADING) * context for tokens, context in rows))


@dataclass(slots=True)
class _Group:
    """Running estimates of the samples of about one size."""

    size: float
    pairs: float
    seconds: float
    """Seconds of a sample, its pairs' part taken off. It follows the fastest samples."""
    mean_seconds: float
    """Seconds of a sample as it was measured; a plain mean."""


class Cost:
    """Seconds by size, with straight lines between measured sizes. No size is dearer than a larger
    one: where measurements disagree, the latest is right."""

    def __init__(self, prior: float = 0.0, *, cautious: bool = False, mean: bool = False) -> None:
        """`prior` are the seconds of a forward of one token before anything was measured; 0: not
        known. With `cautious` all time counts as the tokens' until two sizes were measured; else
        one more token is taken to cost next to nothing, so that it is tried. With `mean` the
        estimates are plain means, the first sample of a size among them: for times in which waiting
        for others counts."""
        self._cautious = cautious
        self._mean = mean
        self._groups: dict[int, _Group | None] = {}
        """By the rounded logarithm of the size; None where only the first forward of the size was
        seen. That one also makes kernels, so it does not count."""
        # The curve of the groups, which `seconds` reads: sizes that grow, seconds that never fall.
        self._sizes: list[float] = [1.0] if prior else []
        self._seconds: list[float] = [prior] if prior else []
        # Sums for the regression of a forward's seconds on its pairs of a query and a key, the work
        # of attention. Both are taken as differences from the means of their group, so that samples
        # of different sizes can be added up.
        self._pairs_squared = 0.0
        self._pairs_by_seconds = 0.0
        self._seconds_squared = 0.0

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return any(self._groups.values())

    @property
    def largest(self) -> float:
        """The largest size that was measured: what more takes is only extended from smaller ones. 0
        before anything was measured."""
        return self._sizes[-1] if self else 0.0

    def observe(self, size: float, seconds: float, pairs: float = 0.0) -> None:
        """Learn from a forward of `size` tokens, which took so many seconds. `pairs` are the pairs
        of a query and a key in its attention, which cost time of their own."""
        seconds = max(_LEAST_SECONDS, seconds)
        key = round(GROUPS_PER_OCTAVE * log2(max(1.0, size)))
        if key not in self._groups and not self._mean:
            # The first forward of a size also makes its kernels: it says nothing of the next ones.
            self._groups[key] = None
            return
        group = self._groups.get(key)
        if group is None:
            group = _Group(size=size, pairs=pairs, seconds=seconds, mean_seconds=seconds)
            self._groups[key] = group
        # A machine that slept meanwhile says nothing of forwards.
        seconds = min(seconds, OUTLIER * group.mean_seconds)
        self._learn_price_of_pairs(group, size, seconds, pairs)

        net_seconds = max(_LEAST_SECONDS, seconds - self._seconds_per_pair * pairs)
        slower = net_seconds > group.seconds
        # What disturbs a forward makes it slower, never faster: so fast samples count for more.
        weight = WEIGHT_IF_SLOWER if slower and not self._mean else WEIGHT_IF_FASTER
        group.size += weight * (size - group.size)
        group.seconds += weight * (net_seconds - group.seconds)
        group.seconds = min(group.seconds, OUTLIER * net_seconds)
        group.pairs += WEIGHT_IF_SLOWER * (pairs - group.pairs)
        group.mean_seconds += WEIGHT_IF_SLOWER * (seconds - group.mean_seconds)
        self._redraw(group, weight)

    def _learn_price_of_pairs(
        self, group: _Group, size: float, seconds: float, pairs: float
    ) -> None:
        """Add a sample to the regression of seconds on attention pairs, as its differences from the
        means of its group, before the group has learned from it."""
        more_pairs = pairs - group.pairs
        # The sample's size is not quite the group's: that part of the difference is no pairs' work.
        more_seconds = seconds - group.mean_seconds - self.seconds(size) + self.seconds(group.size)
        older = 1 - WEIGHT_IF_SLOWER
        self._pairs_squared = older * self._pairs_squared + more_pairs * more_pairs
        self._pairs_by_seconds = older * self._pairs_by_seconds + more_pairs * more_seconds
        self._seconds_squared = older * self._seconds_squared + more_seconds * more_seconds

    def _redraw(self, latest: _Group, weight: float) -> None:
        """Draw the curve of seconds by size anew, through all groups of measured sizes. A group
        that contradicts the `latest`, because it is smaller and dearer or larger and cheaper, moves
        towards it: its samples are older."""
        known = [group for group in self._groups.values() if group is not None]
        known.sort(key=lambda group: group.size)
        for group in known:
            is_larger = group.size > latest.size
            is_cheaper = group.seconds < latest.seconds
            if is_larger == is_cheaper:
                group.seconds += weight * (latest.seconds - group.seconds)
        self._sizes = [group.size for group in known]
        self._seconds = list(accumulate((group.seconds for group in known), max))

    def seconds(self, size: float, pairs: float = 0.0) -> float:
        """Seconds of a forward of so many tokens; the prior before anything was measured."""
        if not self._sizes:
            return 0.0
        return self._seconds_of_tokens(size) + self._seconds_per_pair * pairs

    def _seconds_of_tokens(self, size: float) -> float:
        """The seconds of a forward of so many tokens by the curve of measured sizes, without
        attention pairs. Between two sizes it is a straight line; beyond the ends it goes on."""
        sizes = self._sizes
        seconds = self._seconds
        after = bisect_right(sizes, size)
        if after == 0:
            # Below the smallest size: go on down the first line, but never below the line through
            # zero, on which the tokens take all of the time.
            proportional = seconds[0] * size / sizes[0]
            return max(proportional, seconds[0] - self._first_slope * (sizes[0] - size))
        if after == len(sizes):
            return seconds[-1] + self._last_slope * (size - sizes[-1])
        low = sizes[after - 1]
        high = sizes[after]
        share = (size - low) / (high - low)
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])

    def added(self, tokens: int, context: int = 0, beside: float = 0) -> float:
        """How much longer a forward of `beside` tokens takes with so many more, after `context`
        others."""
        pairs = attention_pairs([(tokens, context)]) if tokens else 0.0
        return self.seconds(beside + tokens, pairs) - self.seconds(beside)

    def fitting(self, seconds: float, most: int, context: int = 0, beside: float = 0) -> int:
        """How many more tokens, `most` at most, may join a forward of `beside` tokens if it is to
        take no more than so many seconds longer. They come after `context` others of their text."""

        def added(count: int) -> float:
            return self.added(count, context, beside)

        too_many = bisect_right(range(most + 1), seconds, key=added)
        return max(0, too_many - 1)

    @property
    def _seconds_per_pair(self) -> float:
        """The slope of the regression of seconds on pairs; 0 while it explains too little."""
        if self._pairs_by_seconds <= 0:
            return 0.0
        explained = self._pairs_by_seconds**2
        if explained < _LEAST_EXPLAINED * self._pairs_squared * self._seconds_squared:
            return 0.0
        return self._pairs_by_seconds / self._pairs_squared

    @property
    def _first_slope(self) -> float:
        """Seconds of a token below the smallest size: those of the first line."""
        if len(self._sizes) < 2:
            return self._last_slope
        return (self._seconds[1] - self._seconds[0]) / (self._sizes[1] - self._sizes[0])

    @property
    def _last_slope(self) -> float:
        """Seconds of a token beyond the largest size: as many as between the smallest and it."""
        if len(self._sizes) >= 2:
            return (self._seconds[-1] - self._seconds[0]) / (self._sizes[-1] - self._sizes[0])
        if self._cautious:
            return self._seconds[-1] / self._sizes[-1]
        return self._seconds[-1] * _UNMEASURED_SLOPE
