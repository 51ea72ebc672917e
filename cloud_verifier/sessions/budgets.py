"""Rate limits of a connection and of a principal: frames, bytes, refusals a second. Pure: no clock,
no I/O.

Frames that bring new work (a round, a prompt, an acknowledgement) are refunded: such work has its
own limits. So a normal client spends almost none of its frames, and the budget can be small.

A connection above its budget is throttled: it is not read until the budget has refilled, and TCP
makes the other end wait. A connection that is throttled for most of some seconds is a flood: it
gets an error with the limit's name and is closed.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from moa.token_bucket import TokenBucket
from moa.wire.limits import Limits

FRAMES = "max_empty_frames_per_second"
BYTES = "max_bytes_per_second"
REFUSALS = "max_refusals_per_second"


class WorkBudget:
    """Budgets for frames, bytes and refusals. They may be overdrawn; then there is a wait."""

    def __init__(self, limits: Limits, now: float, *, times: int = 1) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        for name in (FRAMES, BYTES, REFUSALS):
            rate = times * getattr(limits, name)
            if rate:
                self._buckets[name] = TokenBucket(rate, rate * limits.burst_seconds, now)

    def spend(self, name: str, amount: float) -> None:
        """Spend from a budget."""
        self._buckets[name].spend(amount)

    def wait(self, now: float) -> tuple[float, str]:
        """Seconds until no budget is overdrawn, and the limit with the longest wait."""
        return max((bucket.wait(0, now), name) for name, bucket in self._buckets.items())


@dataclass(eq=False)
class Principal:
    """The shared budgets of all connections of one principal."""

    budget: WorkBudget
    tokens: TokenBucket
    """Tokens of prompts and answers."""
    wrong_guesses: TokenBucket
    """Its own guesses that turn out wrong. They have as much again, and never cost text: a device
    that guesses badly would else get a fraction of its rate."""
    connections: int = 0
    compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Its grammars are compiled one after another: those of others come between."""

    @classmethod
    def of(cls, limits: Limits, now: float) -> Principal:
        """Returns one that has used nothing yet."""
        rate, burst = limits.max_tokens_per_second, limits.max_burst_tokens
        return cls(
            budget=WorkBudget(limits, now, times=limits.connection_budgets_per_principal),
            tokens=TokenBucket(rate, burst, now),
            wrong_guesses=TokenBucket(rate, burst, now),
        )

    def ran(self, tokens: int, guesses: int) -> None:
        """Count a forward that has brought so many tokens, over so many of its own guesses."""
        self.tokens.spend(tokens)
        right = max(0, tokens - 1)  # the last token is the target's own
        self.wrong_guesses.spend(max(0, guesses - right))

    def most_guesses(self, now: float) -> float:
        """How many of its own guesses may be run in a forward now."""
        if self.wrong_guesses.rate <= 0:
            return math.inf
        return max(0.0, self.wrong_guesses.level(now))


class Meter:
    """The budget of one connection, and its part in its principal's."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._budgets = [WorkBudget(limits, now)]
        # Seconds of throttling that are borne. It refills half as fast as a flood spends it.
        self._patience = TokenBucket(0.5, limits.flood_seconds / 2, now)

    def belongs_to(self, principal: Principal) -> None:
        """From now on, spend from the principal's budget too."""
        self._budgets.append(principal.budget)

    def spend(self, name: str, amount: float = 1) -> None:
        """Spend from a budget."""
        for budget in self._budgets:
            budget.spend(name, amount)

    def refund(self) -> None:
        """Give a frame back that brought new work, which has limits of its own."""
        self.spend(FRAMES, -1)

    def wait(self, now: float) -> float:
        """Seconds until the connection may be read again; 0: now."""
        return max(budget.wait(now)[0] for budget in self._budgets)

    def held_back(self, seconds: float, now: float) -> str:
        """Note a wait; returns the name of the limit if it is a flood. Waits caused by the
        principal's other connections do not count."""
        own, name = self._budgets[0].wait(now)
        if own <= 0:
            return ""
        is_flood = self._patience.level(now) < 0
        self._patience.spend(min(seconds, own))
        return name if is_flood else ""
