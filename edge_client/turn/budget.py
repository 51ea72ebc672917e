"""The hard limit for metered links: kilobits a second."""

from __future__ import annotations

from dataclasses import dataclass

from moa.token_bucket import TokenBucket

BYTES_PER_KILOBIT = 125
_BURST_SECONDS = 2.0


@dataclass(slots=True)
class Spending:
    """What has passed over a link. If that is more than the rate allows, the next request waits."""

    max_kbps: float = 0.0
    """0 is no limit."""
    passed: int = 0
    """Bytes over the link so far, in both directions."""
    _bytes: TokenBucket | None = None
    _counted: int = 0

    def wait(self, now: float) -> float:
        """Seconds until the next request may go."""
        rate = self.max_kbps * BYTES_PER_KILOBIT
        if not rate:
            return 0.0
        if self._bytes is None or self._bytes.rate != rate:
            self._bytes = TokenBucket(rate, rate * _BURST_SECONDS, now)
            self._counted = self.passed
        level = self._bytes.level(now)
        self._bytes.spend(self.passed - self._counted)
        level -= self.passed - self._counted
        self._counted = self.passed
        return max(0.0, -level / rate)
