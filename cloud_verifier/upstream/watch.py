"""Looks whether upstreams answer, where no request tells: while none does, while an answer stands
still, and when somebody asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from cloud_verifier.upstream.client import Upstreams

_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 10.0
"""Seconds between two looks at upstreams of which none answers: doubled each time."""
_STALE_SECONDS = 5.0
"""What was heard longer ago proves nothing any more: a request may have gone nowhere since."""
_STEP_SECONDS = 1.0
"""How often the clock is read while all is well: that costs nothing."""


class Watch:
    """Knows whether one of the upstreams answers, and keeps looking while there is a doubt. One
    that nobody asks is not asked: a device's connection may be metered, and services count
    requests."""

    def __init__(
        self,
        upstreams: Upstreams,
        running: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch these upstreams; `running` returns how many answers are being written there."""
        self._upstreams = upstreams
        self._running = running
        self._clock = clock
        self._wanted = asyncio.Event()
        """Set when somebody wants to know now."""
        self._looked_at = float("-inf")
        """When the latest look began."""

    def unready(self) -> str:
        """Why nothing can be asked, in a few words; empty if an upstream answers. Called for health
        checks: what is known is said now, and looked after if it is old."""
        if self._is_stale and self._clock() - self._looked_at >= _STALE_SECONDS:
            self._wanted.set()
        return "no upstream answers" if self._upstreams.away else ""

    @property
    def _is_stale(self) -> bool:
        return self._upstreams.silent_for(self._clock()) >= _STALE_SECONDS

    async def run(self) -> None:
        """Look whenever that is needed, for ever."""
        pause = _FIRST_PAUSE
        while True:
            is_away = bool(self._upstreams.away)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause if is_away else _STEP_SECONDS):
                    await self._wanted.wait()
            is_silent = self._running() > 0 and self._is_stale
            if not (is_away or is_silent or self._wanted.is_set()):
                pause = _FIRST_PAUSE
                continue
            self._wanted.clear()
            self._looked_at = self._clock()
            await self._upstreams.look()
            pause = min(2 * pause, _LONGEST_PAUSE) if self._upstreams.away else _FIRST_PAUSE
