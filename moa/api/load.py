"""The load of an endpoint: so many answers at once at most, with a fair share for each key, counted
as they run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from moa.api.answer import Answerer, AnswerEvent, AnswerRequest, Cut, Encoded, Ended, Piece
from moa.api.errors import ApiError
from moa.api.fairness import one_more
from moa.api.metrics import ApiMetrics


class Counted:
    """Wraps an answerer; at most `most` answers at once, and a fair share of them for each
    principal."""

    def __init__(self, inner: Answerer, metrics: ApiMetrics, most: int) -> None:
        self._inner = inner
        self._metrics = metrics
        self._most = most
        self._running: Counter[str] = Counter()
        self._encoding: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Questions that are being encoded, or wait for it, and whose turn it is."""
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)
        """By principal."""
        metrics.running.set_function(lambda: self.running)

    @property
    def running(self) -> int:
        """Answers that are being written."""
        return self._running.total()

    def status(self, principal: str | None = None) -> dict[str, Any]:
        """The inner answerer's figures, the load, and totals over all answers, or one principal's:
        tokens as they come, the rest when an answer ends."""
        running = self.running
        found = sum(self._totals.values(), Counter[str]())
        if principal is not None:
            running = self._running[principal]
            found = self._totals.get(principal, found - found)
        load = {"running": running, "most_running": self._most}
        totals = {name: found[name] for name in ("tokens", "drafted", "accepted", "calls")}
        return {**self._inner.status(), **load, **totals}

    async def encode(self, ask: AnswerRequest) -> Encoded:
        """The inner answerer's encoding, one at a time for each principal. A grammar is compiled
        beside the questions that come after it: it may take a second."""
        if self._encoding[ask.principal] >= self._most:
            raise self._busy()
        turn = self._turns.setdefault(ask.principal, asyncio.Lock())
        with one_more(self._encoding, ask.principal):
            async with turn:
                encoded = await self._inner.encode(ask)
            await self._inner.admit(ask, encoded)
            return encoded

    @contextlib.asynccontextmanager
    async def tokenizing(self, principal: str) -> AsyncIterator[None]:
        """A principal's turn to have something tokenized, in the row of its questions."""
        if self._encoding[principal] >= self._most:
            raise self._busy()
        turn = self._turns.setdefault(principal, asyncio.Lock())
        with one_more(self._encoding, principal):
            async with turn:
                yield

    async def answer(
        self, ask: AnswerRequest, encoded: Encoded
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The inner answerer's events."""
        others = len(self._running.keys() - {ask.principal})
        if self.running >= self._most or (
            others and self._running[ask.principal] >= max(1, self._most // (others + 1))
        ):
            raise self._busy()
        began = time.monotonic()
        first = True
        length = 0
        totals = self._totals[ask.principal]
        events = self._inner.answer(ask, encoded)
        with one_more(self._running, ask.principal):
            async with contextlib.aclosing(events):
                async for event in events:
                    match event:
                        case Piece():
                            length += len(event.text)
                            totals["tokens"] += 1
                            if first and event.text:
                                first = False
                                self._metrics.first_text.observe(time.monotonic() - began)
                        case Cut():
                            self._metrics.withdrawn.inc(max(0, length - event.characters))
                            length = event.characters
                        case Ended(counts=counts):
                            self._metrics.tokens.labels("prompt").inc(counts.prompt_tokens)
                            self._metrics.tokens.labels("answer").inc(counts.tokens)
                            totals.update(
                                drafted=counts.drafted, accepted=counts.accepted, calls=counts.calls
                            )
                    yield event

    def _busy(self) -> ApiError:
        return ApiError(
            429, f"{self.running} answers are running: try again soon", code="busy", retry_after=1.0
        )
