"""A chat that outgrows the context goes on without its oldest turns: in the terminal, in Python, at
both endpoints."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

ANSWER_ROOM = 1024
"""Tokens of the context that a prompt leaves to an answer which may be as long as the model likes."""
M = TypeVar("M", bound=Mapping[str, Any])
"""A message."""
P = TypeVar("P", bound=tuple[Sequence[Any], *tuple[Any, ...]])
"""An encoded prompt: its ids, and what else the caller wants of it."""


def prompt_room(context: int, answer: int | None) -> int:
    """Tokens that a chat may take of the context, where its answer may have so many; 0 or None: as
    many as the model likes."""
    return context - min(answer or ANSWER_ROOM, context // 2)


def left_out_notice(messages: int) -> str:
    """The line that tells the user what a full context leaves out."""
    return f"the context is full: the {messages} oldest messages are no longer sent"


def fitting(messages: Sequence[M], room: int, encode: Callable[[Sequence[M]], P]) -> tuple[P, int]:
    """Encode a chat so that its prompt is at most `room` tokens long, without the oldest turns if
    it must be. Returns what `encode` makes of the messages that are left, whose first part are the
    ids, and how many messages were left out. Messages of the system at the beginning and the latest
    question are always kept.

    What is left out comes in quarters of the room, so that most turns of a long chat begin like the
    one before, and both ends keep their KV caches.
    """
    first = _first_turn(messages)
    questions = [at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user"]

    def prompt_from(start: int) -> P:
        """The prompt of the system's messages, and those from `start` on."""
        return encode([*messages[:first], *messages[start:]])

    whole = prompt_from(first)
    excess = len(whole[0]) - room
    if excess <= 0 or not questions:
        return whole, 0
    quarter = max(1, room // 4)
    wanted = math.ceil(excess / quarter) * quarter
    # The first question from which on enough is left out; the latest one in any case.
    chosen = bisect_left(
        questions[:-1],
        True,
        key=lambda start: len(whole[0]) - len(prompt_from(start)[0]) >= wanted,
    )
    start = questions[chosen]
    return prompt_from(start), start - first


def _first_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """The place of the first message that is not the system's."""
    for place, message in enumerate(messages):
        if message["role"] != "system":
            return place
    return len(messages)
