"""What an upstream costs, in money, and where that ends. Pure but for the clock."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cloud_verifier.upstream.contract import UpstreamError, Usage

_DAY_SECONDS = 24 * 3600.0
_STEP_SECONDS = 60.0
"""What is spent within so long counts as one sum: a day has 1,440 of them."""
_MILLION = 1_000_000
_WARNED_AT = 0.8
"""The part of a budget at which somebody is told that it ends soon."""
_CALM_BELOW = 0.7
"""The part below which it counts as far from its end again: what is counted too high is corrected
later, and would cross the line above several times."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Money for a million tokens, and what may be spent; all in one currency."""

    read: float = 0.0
    written: float = 0.0
    budget: float = 0.0
    """For 24 hours; 0: no limit."""

    def of(self, usage: Usage) -> float:
        """What these tokens cost."""
        return (usage.read * self.read + usage.written * self.written) / _MILLION


def in_words(amount: float) -> str:
    """Returns a sum of money with two digits behind the point, or as many as it takes to show two
    that count."""
    if amount <= 0 or not math.isfinite(amount):
        return f"{amount:.2f}"
    digits = max(2, 1 - math.floor(math.log10(amount)))
    whole, _, part = f"{amount:.{digits}f}".partition(".")
    return f"{whole}.{part.rstrip('0').ljust(2, '0')}"


class Spending:
    """The money of the last 24 hours. What was spent before a restart is not known."""

    def __init__(
        self,
        prices: Prices,
        clock: Callable[[], float] = time.monotonic,
        reached: Callable[[float], object] = lambda part: None,
    ) -> None:
        """Nothing is spent yet. `reached` is called once when 0.8 of the budget is spent, and once
        when all of it is, with the part that is; again after less was spent in between."""
        self.prices = prices
        self._clock = clock
        self._reached = reached
        self._told = 0.0
        """The part of the budget of which was told last; 0: it is far from its end."""
        self._sums: deque[tuple[float, float]] = deque()
        """When each sum began, and how much it is."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit, for which to count."""
        return self.prices.budget > 0

    @property
    def spent(self) -> float:
        """In the last 24 hours."""
        now = self._clock()
        while self._sums and self._sums[0][0] <= now - _DAY_SECONDS:
            self._sums.popleft()
        return sum(money for _, money in self._sums)

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self.limited and self.spent >= self.prices.budget

    @property
    def why_over(self) -> str:
        """That the budget is used up, in words; empty while it is not."""
        if not self.is_over:
            return ""
        return f"the upstream's budget of {in_words(self.prices.budget)} for 24 hours is spent"

    def check(self) -> None:
        """Raise an `UpstreamError` if the budget is used up, with the time from which there is
        more."""
        if not self.is_over:
            return
        hours = (self._sums[0][0] + _DAY_SECONDS - self._clock()) / 3600
        raise UpstreamError(
            f"{self.why_over} ({in_words(self.spent)}): more from {max(0.1, hours):.1f} hours on",
            later=False,
            hint="raise --upstream-budget",
        )

    def add(self, usage: Usage) -> None:
        """Count tokens of a request; fewer than 0 correct what was counted too high."""
        money = self.prices.of(usage)
        now = self._clock()
        if self._sums and now - self._sums[-1][0] < _STEP_SECONDS:
            began, before = self._sums.pop()
            self._sums.append((began, before + money))
        else:
            self._sums.append((now, money))
        if self.limited:
            self._tell()

    def _tell(self) -> None:
        """Tell whoever wants to know that the budget is nearly or all used up, once each."""
        part = self.spent / self.prices.budget
        if part < _CALM_BELOW:
            self._told = 0.0
        for line in (1.0, _WARNED_AT):
            if part >= line and self._told < line:
                self._told = line
                self._reached(part)
                return

    def request(self, read: int) -> Request:
        """A request that reads so many tokens, which are counted now."""
        self.add(Usage(read=read))
        return Request(self, Usage(read=read))


class Request:
    """What one request costs: as we count, until the upstream tells."""

    def __init__(self, spending: Spending, counted: Usage) -> None:
        self._spending = spending
        self._counted = counted

    def wrote(self, tokens: int) -> None:
        """Tokens have come."""
        self._spending.add(Usage(written=tokens))
        self._counted = Usage(self._counted.read, self._counted.written + tokens)

    def told(self, usage: Usage) -> None:
        """The upstream has told what it counts: that is what it will bill."""
        read, written = self._counted
        self._spending.add(Usage(usage.read - read, usage.written - written))
        self._counted = usage
