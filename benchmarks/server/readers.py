"""Readers: users who read ten tokens a second, each over its own connection, and whether their
tokens are in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from benchmarks.kit.figures import percentiles
from benchmarks.kit.progress import say
from moa.wire.messages import RecordDtype
from testing.devices import Script, ScriptedDevice, Way

SPEED = 10.0
"""Tokens a second that a person reads."""
PATIENCE = 1.0
"""Seconds from asking to the first token; one that comes later makes the reading late."""
BUFFER = 0.2
"""Seconds by which reading begins after the first token is there."""
TOKENS = 40
"""Of an answer, that count."""
RAMP = 1.0
"""Seconds within which all readers ask."""
_MAJORITY = 2
"""Trials of a size that must agree: beside its limit a machine with other load holds it in one and
not in the next."""
_DIALLING = 32
"""Connections that are opened, with their prompts run, at a time."""


@dataclass(frozen=True)
class Trial:
    """The result for a number of readers."""

    readers: int
    late_ms: list[float]
    """Of every token, by how much it came too late (less than 0: in time)."""
    lag_ms: float
    """95th percentile of this process's own delay, which is part of the figures."""

    @property
    def p95(self) -> float:
        """Lateness that 95 of 100 tokens do not exceed."""
        return percentiles(self.late_ms, 95)["p95"]

    @property
    def held(self) -> bool:
        """Whether the verifier holds these readers."""
        return self.p95 <= 0


Try = Callable[[int], Awaitable[Trial]]


def lateness(asked: float, arrivals: Sequence[float], until: float) -> list[float]:
    """Milliseconds by which each of `TOKENS` tokens came too late; those that never came are late
    by `until`."""
    begins = min(arrivals[0] if arrivals else until, asked + PATIENCE) + BUFFER
    came = [*arrivals[:TOKENS], *([until] * (TOKENS - len(arrivals)))]
    return [1000 * (at - (begins + k / SPEED)) for k, at in enumerate(came)]


async def largest(attempt: Try, start: int, most: int) -> tuple[int, list[Trial]]:
    """The largest number of readers that is held in two of three trials: doubling, then bisection
    to a tenth."""
    trials: list[Trial] = []

    async def held(readers: int) -> bool:
        said: list[bool] = []
        while max(said.count(True), said.count(False)) < _MAJORITY:
            trials.append(found := await attempt(readers))
            say(f"  {readers} readers: p95 {found.p95:+.0f} ms, driver lag {found.lag_ms:.0f} ms")
            said.append(found.held)
        return said.count(True) == _MAJORITY

    low = 0
    high = start
    while high <= most and await held(high):
        low = high
        high = 2 * high
    while high <= most and high - low > max(1, high // 10):
        middle = (low + high) // 2
        if await held(middle):
            low = middle
        else:
            high = middle
    return low, trials


async def trial(
    url: str,
    scripts: Sequence[Script],
    readers: int,
    way: Way,
    *,
    records: RecordDtype,
    think: float,
) -> Trial:
    """Open a session for every reader and run its prompt; then all ask within a second."""
    gate = asyncio.Barrier(readers)
    dialling = asyncio.Semaphore(_DIALLING)
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))

    async def read(number: int) -> list[float]:
        asked = until = 0.0
        await dialling.acquire()

        async def begin() -> None:
            nonlocal asked, until
            dialling.release()
            await gate.wait()
            await asyncio.sleep(RAMP * number / readers)
            asked = perf_counter()
            until = asked + PATIENCE + BUFFER + TOKENS / SPEED
            limit.reschedule(asyncio.get_running_loop().time() + until - asked)

        script = scripts[number % len(scripts)]
        device = ScriptedDevice(url, script, way=way, records=records, think=think, begin=begin)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await device.run()
        arrivals = [one.read for one in device.rounds[1:] for _ in range(one.tokens)]
        return lateness(asked, arrivals, until)

    late = await asyncio.gather(*map(read, range(readers)))
    watch.cancel()
    return Trial(readers, [one for each in late for one in each], percentiles(lags, 95)["p95"])


async def _watch(lags: list[float]) -> None:
    while True:
        due = perf_counter() + 0.01
        await asyncio.sleep(0.01)
        lags.append(1000 * (perf_counter() - due))
