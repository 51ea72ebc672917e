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

_FASTER, _SLOWER = 0.3, 0.05
"""Weight of a sample that is faster than estimated, and of a slower one. Other load makes forwards
slower, never faster, so the estimate follows the fastest tenth or so."""
_OUTLIER = 2.0
"""A sample counts as at most twice the estimate, for a machine that slept says nothing of forwards;
and the estimate is at most twice the latest sample, for one that was measured asleep would not be
tried again."""
_SHORTEST = 1e-9
"""Seconds that a forward takes at least, by a clock that stands."""
_PER_OCTAVE = 2
"""Sizes that are told apart between two powers of two."""
_SLOPE = 0.01
"""Seconds of one more token, as a share of the forward's, until two sizes were measured."""
_LOADING = 12
"""Fetching a session's keys and values costs about as much as so many tokens attending to them."""
_MEMORY, _EXPLAINED = 0.98, 0.2
"""Weight that older samples keep in the price of attention; and the least share of the variance of
samples of like size that pairs must explain (r^2), or their price is 0: short contexts would
extrapolate noise to long ones."""


def attention_pairs(rows: Iterable[tuple[int, int]]) -> float:
    """Query-key pairs of a forward with rows of (tokens, context)."""
    return float(sum((tokens + _LOADING) * context for tokens, context in rows))


@dataclass(slots=True)
class _Point:
    """Running estimates of samples of about one size."""

    size: float
    seconds: float
    """Without the pairs' part."""
    pairs: float
    whole: float
    """With it, as a plain mean."""


class Cost:
    """Seconds by size, with straight lines between measured sizes. No size is dearer than a larger
    one: where measurements disagree, the latest is right."""

    def __init__(self, prior: float = 0.0, *, cautious: bool = False, mean: bool = False) -> None:
        """`cautious`: until two sizes were measured, all time is the tokens'; else one more costs 1
        %, so that it is tried. `mean`: of all samples, the first of a size too; for times in which
        waiting for others counts."""
        self._cautious = cautious
        self._mean = mean
        self._points: dict[int, _Point | None] = {}
        """By size; None: met once. The first forward of a size also makes kernels, so it does not
        count."""
        self._sizes, self._seconds = ([1.0], [prior]) if prior else ([], [])
        self._xx = self._xy = self._yy = 0.0
        """Of pairs and seconds, as they differ from the means of their size."""

    def __bool__(self) -> bool:
        return any(self._points.values())

    def observe(self, size: float, seconds: float, pairs: float = 0.0) -> None:
        """A forward of so many tokens took so long."""
        group = round(_PER_OCTAVE * log2(max(1.0, size)))
        if group not in self._points and not self._mean:
            self._points[group] = None
            return
        if (point := self._points.get(group)) is None:
            point = self._points[group] = _Point(
                size, max(_SHORTEST, seconds), pairs, max(_SHORTEST, seconds)
            )
        seconds = min(max(_SHORTEST, seconds), _OUTLIER * point.whole)
        more = pairs - point.pairs
        longer = seconds - point.whole - self.seconds(size) + self.seconds(point.size)
        self._xx = _MEMORY * self._xx + more * more
        self._xy = _MEMORY * self._xy + more * longer
        self._yy = _MEMORY * self._yy + longer * longer
        net = max(0.1 * seconds, seconds - self._pair * pairs)
        weight = _SLOWER if net > point.seconds and not self._mean else _FASTER
        point.size += weight * (size - point.size)
        point.seconds = min(_OUTLIER * net, point.seconds + weight * (net - point.seconds))
        point.pairs += 0.1 * more
        point.whole += 0.1 * (seconds - point.whole)
        known = sorted(
            (other for other in self._points.values() if other is not None),
            key=lambda other: other.size,
        )
        for other in known:  # what is older gives way
            if (other.size > point.size) == (other.seconds < point.seconds):
                other.seconds += weight * (point.seconds - other.seconds)
        self._sizes = [other.size for other in known]
        self._seconds = list(accumulate((other.seconds for other in known), max))

    def seconds(self, size: float, pairs: float = 0.0) -> float:
        """Seconds of a forward of so many tokens; the prior before anything was measured."""
        sizes = self._sizes
        seconds = self._seconds
        extra = self._pair * pairs
        if not sizes:
            return 0.0
        after = bisect_right(sizes, size)
        if after == 0:
            slope = (
                (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
                if len(sizes) > 1
                else self._beyond
            )
            return max(seconds[0] * size / sizes[0], seconds[0] - slope * (sizes[0] - size)) + extra
        if after == len(sizes):
            return seconds[-1] + self._beyond * (size - sizes[-1]) + extra
        low = sizes[after - 1]
        high = sizes[after]
        share = (size - low) / (high - low)
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1]) + extra

    def added(self, tokens: int, context: int = 0, beside: float = 0) -> float:
        """How much longer a forward of `beside` tokens takes with so many more, after `context`
        others."""
        pairs = attention_pairs([(tokens, context)]) if tokens else 0.0
        return self.seconds(beside + tokens, pairs) - self.seconds(beside)

    def fitting(self, seconds: float, most: int, context: int = 0, beside: float = 0) -> int:
        """How many more tokens, `most` at most, make it longer by at most this."""
        counts = range(most + 1)
        return max(
            0,
            bisect_right(counts, seconds, key=lambda count: self.added(count, context, beside)) - 1,
        )

    @property
    def _pair(self) -> float:
        """Seconds of a pair: regression over samples of like size."""
        told = self._xy > 0 and self._xy**2 >= _EXPLAINED * self._xx * self._yy
        return self._xy / self._xx if told else 0.0

    @property
    def _beyond(self) -> float:
        """Seconds of a token beyond the largest size: as steep as on average."""
        if len(self._sizes) < 2:
            return self._seconds[-1] * (1 / self._sizes[-1] if self._cautious else _SLOPE)
        return (self._seconds[-1] - self._seconds[0]) / (self._sizes[-1] - self._sizes[0])
