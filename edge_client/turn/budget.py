"""The hard limit for metered links: kilobits a second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moa.errors import ConfigError
from moa.token_bucket import TokenBucket

_BURST_SECONDS = 2.0
_RECORD_SHARE = 0.7
"""Share of the allowed rate for activation records; the rest is for the tokens."""


@dataclass(frozen=True, slots=True)
class Budget:
    """0 is no limit."""

    max_kbps: float = 0.0

    def __post_init__(self) -> None:
        if (self.max_kbps < 1 and self.max_kbps) or not math.isfinite(self.max_kbps):
            raise ConfigError(f"max_kbps must be a number from 1 on, or 0 for no limit, not {self.max_kbps}")

    @property
    def bytes_per_second(self) -> float:
        """The rate limit, in bytes; 0 is none."""
        return self.max_kbps * 125

    @property
    def record_rate(self) -> int:
        """Rate limit for activations that is sent to the verifier, bytes a second; 0 is no limit."""
        return int(self.bytes_per_second * _RECORD_SHARE)


@dataclass(slots=True)
class Spending:
    """The rest of a budget. If more bytes were used than the rate allows, the next request waits."""

    budget: Budget
    passed: int = 0
    """Bytes over the link so far, in both directions."""
    _bytes: TokenBucket | None = None
    _counted: int = 0

    def wait(self, now: float) -> float:
        """Seconds until the next request may go."""
        rate = self.budget.bytes_per_second
        if not rate:
            return 0.0
        if self._bytes is None or self._bytes.rate != rate:
            self._bytes, self._counted = TokenBucket(rate, rate * _BURST_SECONDS, now), self.passed
        level = self._bytes.level(now)
        self._bytes.spend(self.passed - self._counted)
        level -= self.passed - self._counted
        self._counted = self.passed
        return max(0.0, -level / rate)
