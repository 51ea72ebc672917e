"""Running estimates of what the client measures, and flow control by one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moa.wire.messages import Ack

_PACE_SECONDS = 2.0
"""Time constant of the pace."""
_CLOSE = 0.5
"""Seconds between two runs of records below which the second was sent at the speed of the link."""


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
            self.smoothed, self.variation = seconds, seconds / 2
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

    def add(self, tokens: int, seconds: float) -> None:
        """Tokens arrived within `seconds`."""
        kept = math.exp(-seconds / _PACE_SECONDS)
        self.tokens, self.seconds = self.tokens * kept + tokens, self.seconds * kept + seconds

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
        self.right, self.wrong = self.right * kept + right, self.wrong * kept + wrong
        self.judged += right + wrong

    def begin(self, weight: float) -> None:
        """Another text: earlier guesses count as a prior, with a weight of so many guesses at most."""
        kept = min(1.0, weight / max(1e-9, self.right + self.wrong))
        self.right, self.wrong, self.judged = self.right * kept, self.wrong * kept, 0

    @property
    def length(self) -> float:
        """Expected guesses before the next wrong one."""
        return self.right / max(1e-3, self.wrong)

    @property
    def at_least(self) -> float:
        """The same if the next one is wrong: a few right ones in a row are often luck."""
        return self.right / (self.wrong + 1)


@dataclass
class RecordFlow:
    """The verifier paces records by the acknowledgements, over all sessions of a connection."""

    bandwidth: Smoothed = field(default_factory=Smoothed)
    """Bytes a second at which runs of records arrive, where two follow each other closely."""
    _received: int = 0
    _acknowledged: int = 0
    _last: float = 0.0

    def connected(self) -> None:
        """Counting starts again on every connection."""
        self._received = self._acknowledged = 0

    def arrived(self, size: int, now: float) -> None:
        """A run of records arrived: update the rate."""
        if self._last and size and 0 < now - self._last < _CLOSE:
            self.bandwidth.add(size / (now - self._last))
        self._last = now

    def taken(self, size: int) -> None:
        """A run of records is stored or dropped: the verifier may send more."""
        self._received += size

    def acknowledge(self) -> Ack | None:
        """The acknowledgement to send, if there is anything new."""
        if self._received == self._acknowledged:
            return None
        self._acknowledged = self._received
        return Ack(self._received)
