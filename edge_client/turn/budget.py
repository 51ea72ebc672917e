"""The hard limit for metered links: kilobits a second."""

from __future__ import annotations

from dataclasses import dataclass

from moa.token_bucket import TokenBucket

BYTES_PER_KILOBIT = 125
_BURST_SECONDS = 2.0
"""What the rate allows in so many seconds may pass at once."""


@dataclass(slots=True)
class Spending:
    """What has passed over a link. If that is more than the rate allows, the next request waits."""

    max_kbps: float = 0.0
    """0 is no limit."""
    passed: int = 0
    """Bytes over the link so far, in both directions."""
    _bytes: TokenBucket | None = None
    """The bytes that may pass now."""
    _counted: int = 0
    """Bytes that have passed and are counted there."""

    def wait(self, now: float) -> float:
        """Seconds until the next request may be sent, so that link traffic keeps to `max_kbps`. It
        counts what has passed since the last call; 0 without a limit."""
        rate = self.max_kbps * BYTES_PER_KILOBIT
        if not rate:
            return 0.0
        if self._bytes is None or self._bytes.rate != rate:
            self._bytes = TokenBucket(rate, rate * _BURST_SECONDS, now)
            self._counted = self.passed
        new_bytes = self.passed - self._counted
        self._counted = self.passed
        # Below 0 once more has passed than the rate allows: then the debt is waited off.
        allowed_bytes = self._bytes.level(now) - new_bytes
        self._bytes.spend(new_bytes)
        return max(0.0, -allowed_bytes / rate)
