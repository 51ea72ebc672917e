"""A chat that outgrows the context goes on without its oldest turns: in the terminal, in Python, at
both endpoints."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

ANSWER_ROOM = 1024
"""Tokens of the context that a prompt leaves to an answer which may be as long as the model likes."""
M = TypeVar("M", bound=Mapping[str, Any])
P = TypeVar("P", bound=tuple[Sequence[Any], *tuple[Any, ...]])


def prompt_room(context: int, answer: int | None) -> int:
    """Tokens that a chat may take of the context, where its answer may have so many; 0 or None: as
    many as the model likes."""
    return context - min(answer or ANSWER_ROOM, context // 2)


def left_out_notice(messages: int) -> str:
    """The line for the user."""
    return f"the context is full: the {messages} oldest messages are no longer sent"


def fitting(messages: Sequence[M], room: int, encode: Callable[[Sequence[M]], P]) -> tuple[P, int]:
    """The prompt without its oldest turns, if its first part (ids) is longer than `room`, and how
    many messages that leaves out. Messages of the system at the beginning and the latest question
    are always kept.

    What is left out comes in quarters of the room, so that most turns of a long chat begin like the
    one before, and both ends keep their KV caches.
    """
    first = next(
        (at for at, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    turns = [at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user"]

    def without(left_out: int) -> P:
        return encode([*messages[:first], *messages[left_out:]])

    whole = without(first)
    over = len(whole[0]) - room
    if over <= 0 or not turns:
        return whole, 0
    quarter = max(1, room // 4)
    fewer = -(-over // quarter) * quarter
    place = bisect_left(
        turns[:-1], True, key=lambda at: len(whole[0]) - len(without(at)[0]) >= fewer
    )
    return without(turns[place]), turns[place] - first
