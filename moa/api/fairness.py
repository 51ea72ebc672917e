"""Who keeps the event loop busy waits. The processor time that the requests of a key take on it is
measured and charged to the key, a refusal more than it took, and a key that has used more than its
share waits before its next request. A refusal of somebody without a key is charged to the address,
and comes later the more of them there were: neither delays anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from moa.api.access import ANONYMOUS
from moa.api.errors import ApiError
from moa.token_bucket import TokenBucket

Result = TypeVar("Result")
_SHARE = 0.4
"""Share of the event loop's time that one key may use on average. Answers that run are never slowed
down."""
_BURST_SECONDS = 1.0
"""Seconds of the event loop that one key may use at once."""
_BESIDE_OTHERS = 4.0
"""A request is charged so many times what it took, where somebody else is served meanwhile: then a
key has a tenth of the event loop."""
_REFUSAL_SECONDS = 0.02
"""What a refusal costs a key: 50 at once and 20 a second."""
_LONGEST_WAIT = 5.0
"""Seconds that a request waits for its turn, at most."""
_REFUSALS_PER_SECOND = 50.0
"""Refusals that are sent at once to an address without a key; each takes about a millisecond, its
connection included."""
_MOST_HELD = 32
"""Refusals of one address that wait to be sent; more are not sent at all."""
_MOST_ACCOUNTS = 4096
"""Accounts that are kept."""
_CHARGED: ContextVar[Callable[[float], None]] = ContextVar("_CHARGED")
"""Charges seconds to the key of the task that runs."""


class Accounts:
    """A token bucket for each name. Pure; full ones are forgotten when there are many."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, name: str, now: float) -> TokenBucket:
        """The bucket of this name, from which its use is taken; a full one if there was none."""
        if name not in self._buckets:
            if len(self._buckets) >= _MOST_ACCOUNTS:
                self._forget_some(now)
            self._buckets[name] = TokenBucket(self._rate, self._burst, now)
        return self._buckets[name]

    def _forget_some(self, now: float) -> None:
        """Forget the buckets that are full, which are as good as new ones; and of the others the
        oldest, until half of the most that are kept remain."""
        used = [entry for entry in self._buckets.items() if entry[1].level(now) < self._burst]
        self._buckets = dict(used[-_MOST_ACCOUNTS // 2 :])


class Fairness:
    """The accounts of one endpoint, and who waits."""

    def __init__(self, others: Callable[[str], bool] = lambda principal: False) -> None:
        """`others` tells whether anybody but a principal, the owner of a key, is served now: then
        the principal's work counts for more."""
        self._others = others
        self._keys = Accounts(_SHARE, _BURST_SECONDS)
        self._addresses = Accounts(_REFUSALS_PER_SECOND, _REFUSALS_PER_SECOND)
        self._held = Counter[str]()
        """Refusals that wait to be sent, by address."""

    @contextlib.asynccontextmanager
    async def turn(self, principal: str) -> AsyncIterator[None]:
        """Wait until a principal, the owner of a key, has not used more than its share of the event
        loop, and charge it for the processor time of what the body does. A body that raises costs
        more than it took: a refusal must not be cheap. Without keys nobody shares the endpoint."""
        if principal == ANONYMOUS:
            yield
            return
        bucket = self._keys.of(principal, time.monotonic())
        wait = bucket.wait(0, time.monotonic())
        if wait > 0:
            await asyncio.sleep(min(wait, _LONGEST_WAIT))
        if wait > _LONGEST_WAIT:
            raise ApiError(
                429,
                "this key keeps the server busy beyond its share (key_share): send less at once",
                code="busy",
                limit="key_share",
                retry_after=wait,
            )
        weight = _BESIDE_OTHERS if self._others(principal) else 1.0
        # `charged` reads it: it measures what this task does on the event loop.
        _CHARGED.set(lambda seconds: bucket.spend(weight * seconds))
        try:
            yield
        except Exception:
            bucket.spend(_REFUSAL_SECONDS)
            raise

    async def hold(self, address: str) -> bool:
        """Wait before a refusal is sent to an address, the longer the more of them there were;
        False if it is not to be sent, because too many of the same address wait already."""
        bucket = self._addresses.of(address, time.monotonic())
        bucket.spend(1)
        wait = bucket.wait(0, time.monotonic())
        if wait <= 0:
            return True
        if self._held[address] >= _MOST_HELD:
            return False
        with one_more(self._held, address):
            await asyncio.sleep(min(wait, _LONGEST_WAIT))
        return True


@contextlib.contextmanager
def one_more(counts: Counter[str], name: str) -> Iterator[None]:
    """Count one more of this name while the body runs; a name without any is forgotten."""
    counts[name] += 1
    try:
        yield
    finally:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


async def charged(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work; the processor time that it takes on the event loop is charged to the
    key of this task."""
    charge = _CHARGED.get(None)
    if charge is None:
        return await work
    return await _charged(work, charge)


@types.coroutine
def _charged(
    work: Coroutine[Any, Any, Result], charge: Callable[[float], None]
) -> Generator[Any, Any, Result]:
    """Run a coroutine to its end, and charge the processor time of each of its steps.

    A step runs from one `await` to the next, as the event loop would run it. What the coroutine
    awaits is passed on to the event loop (`yield`); what that sends or raises is passed back in.
    """
    resume: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        started = time.thread_time()
        try:
            awaited = resume(value)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            charge(time.thread_time() - started)
        try:
            value = yield awaited
            resume = work.send
        except BaseException as error:  # a cancellation, for the work to see
            value = error
            resume = work.throw
