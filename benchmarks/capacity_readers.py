"""Readers: people who read ten tokens a second, each over a connection of its own, and whether theirs come in time.

Cheap on purpose, for they share the machine with the verifier: the drafts of a device were made beforehand, for every
place in the text, and a round is one message each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.server_kit import Client, client
from moa.errors import MoaError
from moa.wire import ClientSession
from moa.wire.messages import RecordDtype, Stream, StreamTokens, Verdict, Verify

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

Way = Literal["device", "server", "none"]


@dataclass(frozen=True)
class Text:
    """A prompt, what the target says to it, and what a device drafts after each of its tokens."""

    ids: list[int]
    truth: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    """`drafts[k]` follows `truth[:k]`."""


@dataclass(frozen=True)
class Trial:
    """How so many readers fared."""

    readers: int
    late_ms: list[float]
    """Of every token, by how much it came too late (less than 0: in time)."""
    lag_ms: float
    """95th percentile of how late this process was for its own appointments: what it adds to the figures."""

    @property
    def p95(self) -> float:
        """Lateness that 95 of 100 tokens do not exceed."""
        ordered = sorted(self.late_ms)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    @property
    def held(self) -> bool:
        """Whether the verifier holds these readers."""
        return self.p95 <= 0


def lateness(asked: float, arrivals: Sequence[float], until: float) -> list[float]:
    """Milliseconds by which each of `TOKENS` tokens came too late; those that never came are late by `until`."""
    begins = min(arrivals[0] if arrivals else until, asked + PATIENCE) + BUFFER
    came = [*arrivals[:TOKENS], *([until] * (TOKENS - len(arrivals)))]
    return [1000 * (at - (begins + k / SPEED)) for k, at in enumerate(came)]


async def trial(
    url: str, texts: Sequence[Text], readers: int, way: Way, *, records: RecordDtype, think: float
) -> Trial:
    """Open a session for every reader and run its prompt; then all ask within a second."""
    gate = asyncio.Barrier(readers)
    dialling = asyncio.Semaphore(32)
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    late = await asyncio.gather(
        *(
            _read(url, texts[n % len(texts)], way, records, think, gate, dialling, RAMP * n / readers)
            for n in range(readers)
        )
    )
    watch.cancel()
    lags.sort()
    return Trial(readers, [one for each in late for one in each], lags[int(0.95 * len(lags))] if lags else 0.0)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.01
        await asyncio.sleep(0.01)
        lags.append(1000 * (time.perf_counter() - due))


async def _read(
    url: str,
    text: Text,
    way: Way,
    records: RecordDtype,
    think: float,
    gate: asyncio.Barrier,
    dialling: asyncio.Semaphore,
    wait: float,
) -> list[float]:
    async with contextlib.AsyncExitStack() as stack:
        async with dialling:
            edge = await stack.enter_async_context(client(url))
            session = ClientSession(list(text.ids), max_new_tokens=TOKENS + 1, ignore_eos=True, records=records)
            await edge.start(session)
            first = await edge.advance(session, [session.log[-1]])  # the prompt has run, and token 0 is known
            _compare(list(first.tokens), text.truth[:1])
        await gate.wait()
        await asyncio.sleep(wait)
        asked = time.perf_counter()
        until = asked + PATIENCE + BUFFER + TOKENS / SPEED
        arrivals: list[float] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - asked):
                if way == "device":
                    await _draft(edge, session, text, think, arrivals)
                else:
                    await _listen(edge, session, text, way == "server", arrivals)
        await edge.send(session.close())
    return lateness(asked, arrivals, until)


async def _draft(edge: Client, session: ClientSession, text: Text, think: float, arrivals: list[float]) -> None:
    done, number = 1, 2
    while len(arrivals) < TOKENS:
        await asyncio.sleep(think)
        room = TOKENS - len(arrivals)
        tokens = [text.truth[done - 1], *text.drafts[done][: room - 1]]
        await edge.send(Verify(session.id, number, len(text.ids) + done - 1, tokens))
        answer = await edge.receive()
        if not isinstance(answer, Verdict):
            raise MoaError(f"a round was answered with {answer}")
        won = [*(tokens[node] for node in answer.path[1:]), answer.next_token]
        _compare(won, text.truth[done : done + len(won)])
        arrivals += [time.perf_counter()] * len(won)
        done, number = done + len(won), number + 1


async def _listen(edge: Client, session: ClientSession, text: Text, speculate: bool, arrivals: list[float]) -> None:
    await edge.send(Stream(session.id, 2, len(text.ids), speculate=speculate))
    while len(arrivals) < TOKENS:
        answer = await edge.receive()
        if not isinstance(answer, StreamTokens):
            raise MoaError(f"a stream was answered with {answer}")
        done = 1 + len(arrivals)
        _compare(list(answer.tokens), text.truth[done : done + len(answer.tokens)])
        arrivals += [time.perf_counter()] * len(answer.tokens)
        if answer.done:
            return


def _compare(told: list[int], truth: list[int]) -> None:
    if told != truth:
        raise MoaError("a reader was told another text than the target's own")
