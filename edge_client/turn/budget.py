"""Hard limits for people on metered links: calls to the verifier, and kilobits a second."""

from __future__ import annotations

from dataclasses import dataclass

from moa.errors import ConfigError

_BURST_SECONDS = 2.0
_RECORD_SHARE = 0.7
"""Of the allowed rate, what activation records may take; the rest is for the tokens."""


@dataclass(frozen=True, slots=True)
class Budget:
    """0 is no limit."""

    max_calls: int = 0
    max_kbps: float = 0.0

    def __post_init__(self) -> None:
        if self.max_calls < 0 or self.max_kbps < 0:
            raise ConfigError("budgets must not be negative (0 is no limit)")
        if 0 < self.max_kbps < 1:
            raise ConfigError(f"max_kbps must be at least 1, not {self.max_kbps}")

    @property
    def bytes_per_second(self) -> float:
        """The rate limit, in bytes; 0 is none."""
        return self.max_kbps * 125

    @property
    def record_rate(self) -> int:
        """What the verifier is told to keep activations to, bytes a second; 0 is no limit."""
        return int(self.bytes_per_second * _RECORD_SHARE)


@dataclass(slots=True)
class Spending:
    """What a budget has left. Bytes that were used ahead of the rate are waited for before the next request."""

    budget: Budget
    calls: int = 0
    _credit: float = 0.0
    _seen_bytes: int = 0
    _at: float | None = None

    @property
    def calls_left(self) -> bool:
        """Whether another request may be sent."""
        return not self.budget.max_calls or self.calls < self.budget.max_calls

    @property
    def left(self) -> int | None:
        """How many requests may be sent; None is any number."""
        return max(0, self.budget.max_calls - self.calls) if self.budget.max_calls else None

    def wait(self, total_bytes: int, now: float) -> float:
        """Seconds until the next request may go, when `total_bytes` have passed the link so far."""
        rate = self.budget.bytes_per_second
        if not rate:
            return 0.0
        if self._at is None:
            self._at, self._credit, self._seen_bytes = now, rate * _BURST_SECONDS, total_bytes
        self._credit = min(rate * _BURST_SECONDS, self._credit + (now - self._at) * rate)
        self._credit -= total_bytes - self._seen_bytes
        self._at, self._seen_bytes = now, total_bytes
        return max(0.0, -self._credit / rate)
