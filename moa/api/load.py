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

from msgspec.structs import replace

from moa.api.access import ANONYMOUS
from moa.api.answer import (
    Answerer,
    AnswerEvent,
    AnswerRequest,
    Began,
    Cut,
    Encoded,
    Ended,
    Note,
    Piece,
)
from moa.api.errors import ApiError
from moa.api.fairness import one_more
from moa.api.metrics import ApiMetrics
from moa.chat_window import left_out_notice


class RunningAnswer:
    """One answer that is being written. Whoever takes its `events` passes each one to `counted`."""

    def __init__(
        self,
        events: AsyncGenerator[AnswerEvent, None],
        encoded: Encoded,
        metrics: ApiMetrics,
        totals: Counter[str],
    ) -> None:
        """Count the events of one answer to this question. If messages of it had no room in the
        prompt, its client is told; `totals` are the sums over all answers of its principal,
        the owner of the key."""
        self.events = events
        self._left_out = encoded.left_out
        self._prompt_tokens = len(encoded.ids)
        self._tokens = 0
        """Tokens that have come, those that were withdrawn among them."""
        self._has_ended = False
        self._metrics = metrics
        self._totals = totals
        self._started = time.monotonic()
        self._has_text = False
        self._length = 0
        """Characters that the answer has now."""

    def counted(self, event: AnswerEvent) -> tuple[AnswerEvent, ...]:
        """Count what an event of the answer says in metrics and totals. Returns the events to pass
        on: this one, and beside it a note if messages were left out of the prompt."""
        match event:
            case Began() if self._left_out:
                return (event, Note(left_out_notice(self._left_out)))
            case Piece():
                self._length += len(event.text)
                self._totals["tokens"] += 1
                self._tokens += 1
                if event.text and not self._has_text:
                    self._has_text = True
                    self._metrics.first_text.observe(time.monotonic() - self._started)
            case Cut():
                self._metrics.withdrawn.inc(max(0, self._length - event.characters))
                self._length = event.characters
            case Ended(counts=counts):
                self._has_ended = True
                self._count_tokens(counts.prompt_tokens, counts.tokens)
                self._totals.update(
                    drafted=counts.drafted,
                    accepted=counts.accepted,
                    calls=counts.calls,
                    forwards=counts.forwards,
                    forward_tokens=counts.forward_tokens,
                )
                if self._left_out:
                    more = {**counts.more, "left_out_messages": self._left_out}
                    return (replace(event, counts=replace(counts, more=more)),)
        return (event,)

    def stopped(self) -> None:
        """Count what an answer has cost that was broken off before its end, because its client has
        left, or by an error."""
        if not self._has_ended:
            self._count_tokens(self._prompt_tokens, self._tokens)

    def _count_tokens(self, prompt: int, answer: int) -> None:
        self._metrics.tokens.labels("prompt").inc(prompt)
        self._metrics.tokens.labels("answer").inc(answer)


class Counted:
    """Wraps an answerer; at most so many answers at once, of all and of one principal, and a fair
    share of them for each principal."""

    def __init__(
        self,
        inner: Answerer,
        metrics: ApiMetrics,
        most: int,
        most_of_one: int | None = None,
        *,
        names: tuple[str, str] = ("most_answers", "most_answers"),
    ) -> None:
        """Let at most `most` answers of the `inner` answerer run at once, and of one principal at
        most `most_of_one`; None: as many as of all. `names` are what the operator calls these two
        limits."""
        self._name, self._name_of_one = names
        self._inner = inner
        self._metrics = metrics
        self._most = most
        self.most_of_one = min(most, most_of_one or most)
        """Answers of one principal at once."""
        # All of these are by principal.
        self._running: Counter[str] = Counter()
        """Answers that are being written."""
        self._encoding: Counter[str] = Counter()
        """Questions that are being encoded, or wait for it."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the question that is being encoded."""
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)
        """What all answers have come to."""
        metrics.running.set_function(lambda: self.running)

    @property
    def running(self) -> int:
        """Answers that are being written."""
        return self._running.total()

    def status(self, principal: str | None = None) -> dict[str, Any]:
        """The inner answerer's figures, how many answers run, and totals: over all answers, or over
        those of one principal, the owner of a key. Tokens count as they come, the rest when an
        answer ends."""
        if principal is None:
            running, most = self.running, self._most
            totals = sum(self._totals.values(), Counter[str]())
        else:
            running, most = self._running[principal], self.most_of_one
            totals = self._totals.get(principal, Counter[str]())
        return {
            **self._inner.status(),
            "running": running,
            "most_running": most,
            "tokens": totals["tokens"],
            "drafted": totals["drafted"],
            "accepted": totals["accepted"],
            "calls": totals["calls"],
            "forwards": totals["forwards"],
            "forward_tokens": totals["forward_tokens"],
        }

    async def encode(self, ask: AnswerRequest) -> Encoded:
        """Put a question into tokens, one at a time for each principal (the owner of a key), so
        that nobody keeps all threads busy. A grammar is compiled beside the questions that come
        after it: it may take a second."""
        self._check_encoding(ask.principal)
        turn = self._turns.setdefault(ask.principal, asyncio.Lock())
        with one_more(self._encoding, ask.principal):
            async with turn:
                encoded = await self._inner.encode(ask)
            await self._inner.admit(ask, encoded)
            return encoded

    @contextlib.asynccontextmanager
    async def tokenizing(self, principal: str) -> AsyncIterator[None]:
        """A principal's turn to have something tokenized, in line with its questions."""
        self._check_encoding(principal)
        turn = self._turns.setdefault(principal, asyncio.Lock())
        with one_more(self._encoding, principal):
            async with turn:
                yield

    @contextlib.asynccontextmanager
    async def answering(self, ask: AnswerRequest, encoded: Encoded) -> AsyncIterator[RunningAnswer]:
        """Begin an answer, and count it as running while the body takes its events; it ends with
        the body. An `ApiError` if too many answers run."""
        self._check_running(ask.principal)
        totals = self._totals[ask.principal]
        with one_more(self._running, ask.principal):
            async with contextlib.aclosing(self._inner.answer(ask, encoded)) as events:
                running = RunningAnswer(events, encoded, self._metrics, totals)
                try:
                    yield running
                finally:
                    running.stopped()

    def _check_encoding(self, principal: str) -> None:
        """Refuse a question if too many of its principal's wait."""
        if self._encoding[principal] >= self.most_of_one:
            raise self._too_many_of_one(principal)

    def _check_running(self, principal: str) -> None:
        """Raise an `ApiError` if this principal has as many answers as it may have, or its share of
        them already: as many as all that have answers running would have, if they had equally many.
        If there are too many of all, one that has none gets one all the same: it must not wait for
        others, who may never end."""
        own = self._running[principal]
        others = len(self._running.keys() - {principal})
        share = max(1, self._most // (others + 1))
        if own >= self.most_of_one:
            raise self._too_many_of_one(principal)
        if others > 0 and own >= share:
            raise _busy(own, "answer", " of this key", f"its share of {self._most}", self._name)
        if own and self.running >= self._most:
            raise _busy(self.running, "answer", "", "as many as there may be at once", self._name)

    def _too_many_of_one(self, principal: str) -> ApiError:
        """The refusal of a question of this principal because it has as many as it may. Whether
        they are being read or answered, it cannot tell. Without keys nobody is told of one."""
        if principal == ANONYMOUS:
            whose, most = "", "as many as there may be at once"
        else:
            whose, most = " of this key", "as many as it may have at once"
        return _busy(self.most_of_one, "question", whose, most, self._name_of_one)


def _busy(count: int, what: str, whose: str, most: str, limit: str) -> ApiError:
    """The refusal because so many are under way, which is the `most` by this limit."""
    are = f"1 {what}{whose} is" if count == 1 else f"{count} {what}s{whose} are"
    words = f"{are} under way, {most} ({limit}): ask again when one has been answered"
    return ApiError(429, words, code="busy", limit=limit, retry_after=1.0)
