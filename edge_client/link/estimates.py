"""Running estimates of what the client measures."""

from __future__ import annotations

from dataclasses import dataclass


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
