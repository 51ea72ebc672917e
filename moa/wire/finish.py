"""When a turn ends. The server decides it and the edge checks it with the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa.wire.messages import Finish

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What ends a turn. `start` is the position of its first output token."""

    start: int
    max_new_tokens: int
    max_context: int
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


def first_finish(
    rules: TurnRules, log: Sequence[int], new: Sequence[int], decode: Decode | None
) -> tuple[int, Finish]:
    """Find where a turn (an answer) ends among the `new` tokens that follow the tokens so far,
    `log`: returns how many of them belong to it, and why it ends there ("" if it goes on).

    `decode` turns output tokens into text; it is only called when there are stop strings.
    """
    for index, token in enumerate(new):
        length = len(log) + index + 1
        if token in rules.eos_ids:
            return index + 1, "eos"
        if rules.stop and decode is not None and _stopped(rules, log, new[: index + 1], decode):
            return index + 1, "stop"
        if length >= rules.max_context:
            return index + 1, "context"
        if length - rules.start >= rules.max_new_tokens:
            return index + 1, "length"
    return len(new), ""


def cut_path(
    rules: TurnRules,
    log: Sequence[int],
    tokens: Sequence[int],
    path: Sequence[int],
    next_token: int,
    decode: Decode | None,
) -> tuple[list[int], int, Finish]:
    """Cut what the target accepted of a draft where the turn (an answer) ends.

    `tokens` are those of the draft, a tree whose node 0 is the last token of the text so far,
    `log`. `path` are the accepted nodes, node 0 first, and `next_token` is the target's own after
    them. Returns the nodes of the path that belong to the turn, the token after these, and why the
    turn ends there ("" if it goes on).
    """
    new = [tokens[node] for node in path[1:]]
    new.append(next_token)
    count, finish = first_finish(rules, log, new, decode)
    # Node 0 is no new token, so the first `count` nodes have `count` new ones, the last behind them.
    return list(path[:count]), new[count - 1], finish


def _stopped(rules: TurnRules, log: Sequence[int], new: Sequence[int], decode: Decode) -> bool:
    """Whether the output of a turn, with the `new` tokens behind the tokens so far, `log`, contains
    a stop string. Only its end is decoded: the rest was looked at when its tokens came."""
    # Every token except a few special ones adds at least a byte, so this window contains the
    # longest stop string.
    window = max(len(stop.encode()) for stop in rules.stop) + 16
    output = [*log[max(rules.start, len(log) - window) :], *new][-window:]
    text = decode(output)
    return any(stop in text for stop in rules.stop)
