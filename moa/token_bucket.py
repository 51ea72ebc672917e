"""A token bucket: a limit on the average rate and on bursts. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """At most `rate` a second on average and at most `burst` at once. A rate of 0 is no limit."""

    rate: float
    burst: float
    now: float
    """The latest time that a caller passed, in seconds."""
    _level: float = field(init=False)
    """The amount that could be spent at that time; below zero after an advance."""

    def __post_init__(self) -> None:
        self._level = self.burst

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be spent; 0 is now. A full bucket allows any amount, even one
        above the burst."""
        if self.rate <= 0:
            return 0.0
        wanted = min(amount, self.burst)
        return max(0.0, (wanted - self.level(now)) / self.rate)

    def spend(self, amount: float) -> None:
        """Take `amount` out, or put it back where it is negative. The level may fall below zero:
        then later amounts wait."""
        self._level = min(self.burst, self._level - amount)

    def take(self, amount: float, now: float) -> bool:
        """Spend `amount` if that may be done now."""
        if self.wait(amount, now) > 0:
            return False
        self.spend(amount)
        return True

    def level(self, now: float) -> float:
        """The amount that may be spent now."""
        passed = max(0.0, now - self.now)  # 0 where another caller's time is later
        self._level = min(self.burst, self._level + passed * self.rate)
        self.now = max(self.now, now)
        return self._level
