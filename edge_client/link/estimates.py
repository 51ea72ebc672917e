"""Running estimates of what the client measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

_PACE_SECONDS = 2.0
"""Time constant of the pace."""
_KEPT_BY_A_GUESS = 0.98
"""Share of the weight of earlier guesses that is left after another one: the latest 50 count most."""


@dataclass(slots=True)
class RoundTrip:
    """Smoothed round-trip time and its variation, as TCP estimates them; seconds."""

    smoothed: float = 0.0
    variation: float = 0.0
    samples: int = 0

    def add(self, seconds: float) -> None:
        """Take in a measurement in seconds, with TCP's weights: an eighth of it, and a quarter of how
        far it is from the estimate."""
        seconds = max(0.0, seconds)
        if self.samples == 0:
            self.smoothed = seconds
            self.variation = seconds / 2
        else:
            self.variation += (abs(seconds - self.smoothed) - self.variation) / 4
            self.smoothed += (seconds - self.smoothed) / 8
        self.samples += 1

    def restart(self, seconds: float) -> None:
        """Begin anew with a measurement: a new connection may lead over another network."""
        self.samples = 0
        self.add(seconds)

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
        """Take in a measurement."""
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
        """Take in that so many tokens arrived within `seconds`. Earlier ones count less, the longer
        ago they are."""
        kept = math.exp(-seconds / _PACE_SECONDS)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds

    @property
    def rate(self) -> float:
        """Tokens a second lately; 0 before the first measurement."""
        if self.seconds <= 0:
            return 0.0
        return self.tokens / self.seconds


@dataclass(slots=True)
class Streak:
    """Expected guesses in a row that are right, from the share of right ones among the latest."""

    right: float
    wrong: float
    judged: int = 0
    """Guesses of this text so far."""

    def add(self, right: int, wrong: bool) -> None:
        """Take in that `right` guesses in a row were right, and that the one behind them was `wrong`,
        or that there was none."""
        wrong_guesses = 1 if wrong else 0
        kept = _KEPT_BY_A_GUESS ** (right + wrong_guesses)
        self.right = self.right * kept + right
        self.wrong = self.wrong * kept + wrong_guesses
        self.judged += right + wrong_guesses

    def begin(self, weight: float) -> None:
        """Begin with another text: earlier guesses count as a prior, with a weight of so many guesses
        at most."""
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
        """Expected guesses before the next wrong one, if the very next one is wrong: a few right ones
        in a row are often luck."""
        return self.right / (self.wrong + 1)
