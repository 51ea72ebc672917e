"""Answers to the same prompt with different settings: for `bench`, `audit` and `demo`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Unpack

from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import AnswerSoFar, Event
from edge_client.settings import ClientSettings, TurnChanges
from moa.errors import MoaError
from moa.logprobs import TokenLogprobs

See = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer's tokens and figures."""

    ids: list[int]
    text: str
    verified: bool
    reason: str
    stats: dict[str, Any]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position, of the verified tokens, if they were asked for."""


async def ask(
    client: EdgeClient | Conversation, ids: Sequence[int], see: See | None = None, **changes: Unpack[TurnChanges]
) -> TimedAnswer:
    """Run one turn to its end; `see` gets every event."""
    told = AnswerSoFar()
    async for event in client.generate(ids=ids, **changes):
        told.take(event)
        if see is not None:
            see(event)
    if (done := told.done) is None:
        raise MoaError("the answer never ended")
    return TimedAnswer(told.ids, done.text, done.verified, done.reason, done.stats, told.logprobs)


async def ask_all(
    settings: ClientSettings, device: Device, prompts: Sequence[Sequence[int]], **changes: Any
) -> list[TimedAnswer]:
    """Ask all prompts, each in a new conversation, one after another on one connection."""
    settings = dataclasses.replace(settings, **changes)
    async with EdgeClient(settings, device=device) as client:
        await client.wait_online()
        return [await ask(client, ids) for ids in prompts]


def rates(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Figures over several answers."""
    total: dict[str, float] = {}
    for answer in answers:
        for name in ("tokens", "seconds", "calls", "rounds", "accepted", "sent_bytes", "received_bytes"):
            total[name] = total.get(name, 0) + answer.stats.get(name, 0)
    firsts = sorted(answer.stats["first_token_seconds"] for answer in answers)
    # Stats have only the median of an answer's rounds: weight it by the number of rounds.
    medians = [(a.stats.get("overhead_ms"), a.stats["rounds"]) for a in answers]
    overheads = [milliseconds for milliseconds, rounds in medians if milliseconds is not None for _ in range(rounds)]
    return {
        "tokens": total["tokens"],
        "tokens_per_second": total["tokens"] / max(1e-9, total["seconds"]),
        "calls_per_100": 100 * total["calls"] / max(1, total["tokens"]),
        "tokens_per_round": (total["accepted"] + total["rounds"]) / total["rounds"] if total["rounds"] else 0.0,
        "kilobytes": (total["sent_bytes"] + total["received_bytes"]) / 1000,
        "first_token_ms": 1000 * firsts[len(firsts) // 2],
        "overhead_ms": median(overheads) if overheads else 0.0,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two token lists differ, or None."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
