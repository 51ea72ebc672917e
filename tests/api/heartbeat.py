"""How long the event loop is kept from other work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from moa.process.memory import leave_out_what_is_loaded


class Heartbeat:
    """`longest`: seconds of processor time that the loop's thread spent between two beats; `limit`: what it may spend,
    0.2 s where a million steps of a generator take 25 ms."""

    longest = 0.0
    limit = 0.0


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    """Measures while the body runs. Processor time of this thread, so that other load does not count."""
    leave_out_what_is_loaded()  # as the programs do
    beat = Heartbeat()

    async def run() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            beat.longest, last = max(beat.longest, now - last), now

    task = asyncio.create_task(run())
    try:
        await asyncio.sleep(0.01)
        yield beat
    finally:
        task.cancel()
        began = time.thread_time()
        sum(number for number in range(1_000_000))
        beat.limit = 8 * (time.thread_time() - began)
