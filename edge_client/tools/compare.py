"""Answers to the same prompt with different settings: for `bench`, `audit` and `demo`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Unpack

from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import AnswerSoFar, Event, Link
from edge_client.settings import ClientSettings, TurnChanges
from edge_client.text.chat import Messages
from moa.errors import LinkError, MoaError
from moa.logprobs import TokenLogprobs
from moa.safe_text import safe_line

See = Callable[[Event], None]
RATES = ("tokens/s", "tokens a forward", "kB")
"""Headings of what `cells` returns. A forward is the target's, whoever drafted for it."""


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
    client: EdgeClient | Conversation,
    ids: Sequence[int],
    see: See | None = None,
    *,
    messages: Messages = (),
    **changes: Unpack[TurnChanges],
) -> TimedAnswer:
    """Run one turn to its end and return its answer; `see` is called with every event. `messages`
    is the chat that the ids are of, for upstreams that want it."""
    answer = AnswerSoFar()
    async for event in client.generate(ids=ids, messages=messages, **changes):
        answer.take(event)
        if see is not None:
            see(event)
    done = answer.done
    if done is None:
        raise MoaError("the answer never ended")
    return TimedAnswer(
        ids=answer.ids,
        text=done.text,
        verified=done.verified,
        reason=done.reason,
        stats=done.stats,
        logprobs=answer.logprobs,
    )


async def ask_target(
    client: EdgeClient,
    ids: Sequence[int],
    *,
    messages: Messages = (),
    **changes: Unpack[TurnChanges],
) -> TimedAnswer:
    """As `ask`. An error where an answer is not the target's own, to its end: it would say nothing of
    the target."""
    why = ""

    def see(event: Event) -> None:
        nonlocal why
        if isinstance(event, Link):
            why = event.detail

    answer = await ask(client, ids, see, messages=messages, **changes)
    if not answer.verified:
        why = why or (client.link.away if client.link is not None else "") or "the link was lost"
        raise LinkError(f"an answer was not verified: {safe_line(why)}")
    return answer


async def ask_all(
    settings: ClientSettings, device: Device, questions: Sequence[str], **changes: Any
) -> list[TimedAnswer]:
    """Ask all questions, each in a new conversation, one after another on one connection. An error
    where an answer is not the target's own."""
    settings = dataclasses.replace(settings, **changes)
    answers = []
    async with EdgeClient(settings, device=device) as client:
        await client.wait_online()
        for question in questions:
            chat: Messages = [{"role": "user", "content": question}]
            answers.append(await ask_target(client, client.encode(question), messages=chat))
    return answers


def rates(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Returns the figures of several answers taken together: speed, tokens a forward, calls,
    traffic."""
    total: Counter[str] = Counter()
    streamed = 0
    for answer in answers:
        for name in ("tokens", "seconds", "calls", "forwards", "sent_bytes", "received_bytes"):
            total[name] += answer.stats.get(name, 0)
        streamed += sum(answer.stats.get("streamed_by", {}).values())
    return {
        "tokens": total["tokens"],
        "tokens_per_second": total["tokens"] / max(1e-9, total["seconds"]),
        "tokens_per_forward": streamed / max(1, total["forwards"]),
        "calls_per_100": 100 * total["calls"] / max(1, total["tokens"]),
        "kilobytes": (total["sent_bytes"] + total["received_bytes"]) / 1000,
        "first_token_ms": 1000 * median(answer.stats["first_token_seconds"] for answer in answers),
    }


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Return the cells of a table's row; the columns are `RATES`. Bytes that are not known are a
    dash."""
    kilobytes = figures["kilobytes"]
    return [
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['tokens_per_forward']:.2f}",
        "-" if kilobytes is None else f"{kilobytes:.1f}",
    ]
