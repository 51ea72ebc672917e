"""A normal client of the verifier: it keeps asking, checks every token, and measures each answer.
Many are a crowd."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from testing.client import Client, client

PROMPT = tuple(range(40, 56))
TOKENS = 200
_CROWDS_TOKENS = 1500


@dataclass
class Watched:
    """The neighbour's measurements."""

    seconds: list[float] = field(default_factory=list)
    """Of each round, from asking to the verdict."""
    texts: list[list[int]] = field(default_factory=list)
    admitted: float = 0.0
    """Seconds from the first asking until it was let in, with a session."""

    def percentile(self, share: float) -> float:
        """Milliseconds that this share of the rounds took at most."""
        ordered = sorted(self.seconds)
        return (
            1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
            if ordered
            else math.inf
        )

    @property
    def p50(self) -> float:
        """Median, in milliseconds."""
        return 1000 * statistics.median(self.seconds) if self.seconds else math.inf


async def neighbour(url: str, token: str, seconds: float) -> Watched:
    """One client that asks for that long."""
    watched = Watched()
    async with client(url, token=token) as edge:
        await _ask(edge, seconds, watched, PROMPT, TOKENS)
    return watched


async def _ask(
    edge: Client, seconds: float, watched: Watched, prompt: tuple[int, ...], tokens: int
) -> None:
    """One round after another; a text is `tokens` long, then comes the next session."""
    began = time.monotonic()
    edge.longest_pause = math.inf
    while time.monotonic() - began < seconds:
        session = await edge.start(prompt, patient=True, max_new_tokens=tokens, ignore_eos=True)
        watched.texts.append([])
        while not session.finish and time.monotonic() - began < seconds:
            asked = time.monotonic()
            await edge.guess(session, [session.log[-1]])
            watched.seconds.append(time.monotonic() - asked)
            watched.admitted = watched.admitted or time.monotonic() - began
            watched.texts[-1] = session.log[len(prompt) :]
        await edge.send(session.close())


def problems(*seen: Watched) -> list[str]:
    """What is wrong with what was told: all texts are beginnings of one."""
    texts = [text for watched in seen for text in watched.texts]
    longest = max(texts, key=len, default=[])
    return (
        ["the neighbour's text changed"]
        if any(text != longest[: len(text)] for text in texts)
        else []
    )


@contextlib.asynccontextmanager
async def crowd(url: str, token: str, sessions: int) -> AsyncIterator[list[Watched]]:
    """So many clients of one principal, each of which asks again as soon as it is answered."""
    seen = [Watched() for _ in range(sessions)]
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        # One after another: so many half-open connections at a time are a flood, which is dropped.
        edges = [await stack.enter_async_context(client(url, token=token)) for _ in seen]
        tasks = [
            group.create_task(
                _ask(edge, math.inf, one, (40 + number % 50, *range(50, 60)), _CROWDS_TOKENS)
            )
            for number, (edge, one) in enumerate(zip(edges, seen, strict=True))
        ]
        yield seen
        for task in tasks:
            task.cancel()
