"""Running estimates of what the client measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

_PACE_SECONDS = 2.0
"""Time constant of the pace."""


@dataclass(slots=True)
class RoundTrip:
    """Smoothed round-trip time and its variation, as TCP estimates them; seconds."""

    smoothed: float = 0.0
    variation: float = 0.0
    samples: int = 0

    def add(self, seconds: float) -> None:
        """A measurement."""
        seconds = max(0.0, seconds)
        if self.samples == 0:
            self.smoothed = seconds
            self.variation = seconds / 2
        else:
            self.variation += (abs(seconds - self.smoothed) - self.variation) / 4
            self.smoothed += (seconds - self.smoothed) / 8
        self.samples += 1

    def usual(self, expected: float) -> float:
        """Seconds within which an answer should arrive if the server needs `expected` seconds."""
        return self.smoothed + 4 * self.variation + 2 * expected


@dataclass(slots=True)
class Smoothed:
    """An exponentially weighted mean that starts at its first sample."""

    weight: float = 0.2
    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        """A measurement."""
        # The first few samples count as a plain mean, so that none of them dominates.
        weight = max(self.weight, 1.0 / (self.samples + 1))
        self.value += (sample - self.value) * weight
        self.samples += 1


@dataclass(slots=True)
class Pace:
    """Tokens a second, as a ratio of sums: the mean of the rates of bunches would be far too high."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Tokens arrived within `seconds`."""
        kept = math.exp(-seconds / _PACE_SECONDS)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds

    @property
    def rate(self) -> float:
        """0 before the first measurement."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Streak:
    """Expected guesses in a row that are right, from the share of right ones among the latest."""

    right: float
    wrong: float
    judged: int = 0
    """Guesses of this text so far."""

    def add(self, right: int, wrong: bool) -> None:
        """`right` guesses were right, and then one was wrong, or there was none."""
        kept = 0.98 ** (right + wrong)
        self.right = self.right * kept + right
        self.wrong = self.wrong * kept + wrong
        self.judged += right + wrong

    def begin(self, weight: float) -> None:
        """Another text: earlier guesses count as a prior, with a weight of so many guesses at most."""
        kept = min(1.0, weight / max(1e-9, self.right + self.wrong))
        self.right = self.right * kept
        self.wrong = self.wrong * kept
        self.judged = 0

    @property
    def length(self) -> float:
        """Expected guesses before the next wrong one."""
        return self.right / max(1e-3, self.wrong)

    @property
    def at_least(self) -> float:
        """The same if the next one is wrong: a few right ones in a row are often luck."""
        return self.right / (self.wrong + 1)
