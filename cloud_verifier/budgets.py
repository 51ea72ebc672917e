"""How much one connection, and one principal, may ask for: frames, bytes, refusals a second. Pure: no clock, no I/O.

Frames that bring new work (a round, a prompt, news of what has arrived) are given back: such work has limits of its
own. So an honest client uses next to nothing of its frames, and the budget can be small.

A connection that asks for more is held back: it is not read until its budget has filled up again, and TCP tells the
other end to wait. One that has been held back for most of some seconds is a flood: it is told the limit, and cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from moa.token_bucket import TokenBucket
from moa.wire.limits import Limits

FRAMES = "max_empty_frames_per_second"
BYTES = "max_bytes_per_second"
REFUSALS = "max_refusals_per_second"


class WorkBudget:
    """Frames, bytes and refusals of whoever they are counted for. Spending may overdraw it; then there is a wait."""

    def __init__(self, limits: Limits, now: float, *, times: int = 1) -> None:
        self._buckets = {
            name: TokenBucket(rate, rate * limits.burst_seconds, now)
            for name in (FRAMES, BYTES, REFUSALS)
            if (rate := times * getattr(limits, name))
        }

    def spend(self, name: str, amount: float) -> None:
        """Count something that has been done."""
        self._buckets[name].spend(amount)

    def wait(self, now: float) -> tuple[float, str]:
        """Seconds until nothing is overdrawn, and the limit that it takes longest for."""
        return max((bucket.wait(0, now), name) for name, bucket in self._buckets.items())


@dataclass(eq=False)
class Principal:
    """What all connections of one principal have together."""

    budget: WorkBudget
    tokens: TokenBucket
    """Prompt and draft tokens."""
    connections: int = 0


class Meter:
    """The budget of one connection, and its part in its principal's."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._budget = WorkBudget(limits, now)
        self._principal: WorkBudget | None = None
        # Seconds of being held back. It refills half as fast as a flood spends it.
        self._patience = TokenBucket(0.5, limits.flood_seconds / 2, now)

    def belongs_to(self, principal: Principal) -> None:
        """From now on, count for the principal too."""
        self._principal = principal.budget

    def spend(self, name: str, amount: float = 1) -> None:
        """Count something that has been done."""
        self._budget.spend(name, amount)
        if self._principal is not None:
            self._principal.spend(name, amount)

    def give_back(self, name: str, amount: float = 1) -> None:
        """What was counted has turned out to be useful."""
        self.spend(name, -amount)

    def wait(self, now: float) -> float:
        """Seconds until more may be done; 0 for now."""
        own, _ = self._budget.wait(now)
        return max(own, self._principal.wait(now)[0] if self._principal is not None else 0.0)

    def held_back(self, seconds: float, now: float) -> str:
        """Note a wait; the name of the limit when it is a flood. Waits that others of the principal cause are none."""
        own, name = self._budget.wait(now)
        if own <= 0:
            return ""
        flood = self._patience.level(now) < 0
        self._patience.spend(min(seconds, own))
        return name if flood else ""
