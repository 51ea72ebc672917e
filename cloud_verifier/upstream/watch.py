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
_CHECK_SECONDS = 0.8
"""For so long a health check waits for a look: Kubernetes gives a probe 1 s where nothing else is
said."""
_SILENT_SECONDS = 0.4
"""A look without an answer for so long, and for twice as long as one took lately, is in vain as far as
a health check is concerned: it has begun within that check."""
_STEP_SECONDS = 0.1
"""How often the clock is read: a device whose upstream is silent goes on after a second."""
_ALIVE_SECONDS = 2.0
"""For so long at least an upstream that has answered something counts as alive."""
_ALIVE_LOOKS = 4.0
"""Or for so many times as long as it took to tell its models lately: on a machine that is busy with a
prompt that takes seconds."""
_SLOW_SECONDS = 0.3
"""A request without an answer for so long is a slow one: it is looked whether the upstream lives,
before the device takes it for gone."""


class Watch:
    """Knows whether one of the upstreams answers, and keeps looking while there is a doubt. One
    that nobody asks is not asked: a device's connection may be metered, and services count
    requests."""

    def __init__(
        self,
        upstreams: Upstreams,
        running: Callable[[], int],
        awaited_for: Callable[[float], float] = lambda now: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch these upstreams; `running` returns how many answers are being written there, and
        `awaited_for` since how many seconds the oldest request has no answer, at this time."""
        self._upstreams = upstreams
        self._running = running
        self._awaited_for = awaited_for
        self._clock = clock
        self._wanted = asyncio.Event()
        """Set when somebody wants to know now."""
        self._looked_at = float("-inf")
        """When the latest look began."""
        self._idle = asyncio.Event()
        """Set while no look is under way, and none is wanted."""
        self._idle.set()

    async def look_if_old(self) -> None:
        """Have upstreams looked at of which nothing was heard lately, and wait for a moment for what
        comes of that."""
        if self._is_stale and self._clock() - self._looked_at >= _STALE_SECONDS:
            self._wanted.set()
            self._idle.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._idle.wait()

    def unready(self) -> str:
        """Why nothing can be asked, in a few words; empty if an upstream answers, as far as is
        known."""
        if self._upstreams.away:
            return "no upstream answers"
        return "the upstream says nothing" if self._is_silent else ""

    @property
    def _is_silent(self) -> bool:
        """Whether nothing was heard lately, and a look that is under way brings no answer either."""
        if self._idle.is_set() or not self._is_stale:
            return False
        patience = max(_SILENT_SECONDS, 2 * self._upstreams.look_seconds)
        return self._clock() - self._looked_at >= patience

    @property
    def is_alive(self) -> bool:
        """Whether an upstream has answered something just now."""
        alive_for = max(_ALIVE_SECONDS, _ALIVE_LOOKS * self._upstreams.look_seconds)
        return self._upstreams.silent_for(self._clock()) < alive_for

    @property
    def _is_stale(self) -> bool:
        return self._upstreams.silent_for(self._clock()) >= _STALE_SECONDS

    @property
    def _is_doubted(self) -> bool:
        """Whether somebody waits for an upstream that may be gone: an answer stands still, or does
        not begin while nothing else is heard. A service that is slow by nature is asked about once a
        second at most."""
        now = self._clock()
        if self._awaited_for(now) >= _SLOW_SECONDS:
            quiet_for = min(self._upstreams.silent_for(now), now - self._looked_at)
            return quiet_for >= _ALIVE_SECONDS / 2
        return self._running() > 0 and self._is_stale and not self._upstreams.away

    def _is_due(self, pause: float) -> bool:
        """Whether to look now: somebody wants to know, there is a doubt, or the `pause` between two
        looks at upstreams that are away is over. One that has taken a request may be back."""
        if self._wanted.is_set() or self._is_doubted:
            return True
        return bool(self._upstreams.away) and self._clock() - self._looked_at >= pause

    async def run(self) -> None:
        """Look whenever that is needed, for ever."""
        pause = _FIRST_PAUSE
        self._looked_at = self._clock()  # whoever starts this has just asked
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STEP_SECONDS):
                    await self._wanted.wait()
            if not self._upstreams.away:
                pause = _FIRST_PAUSE
            if not self._is_due(pause):
                continue
            self._wanted.clear()
            self._idle.clear()
            self._looked_at = self._clock()
            await self._upstreams.look()
            self._idle.set()
            pause = min(2 * pause, _LONGEST_PAUSE) if self._upstreams.away else _FIRST_PAUSE
