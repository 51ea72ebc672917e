"""The actions that the turn machine returns to its shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.events import Reason
from moa.wire.messages import ClientMessage


@dataclass(frozen=True, slots=True)
class Send:
    """Send these messages, in this order."""

    messages: tuple[ClientMessage, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """Grow the tree of guesses after `ids` by a step of the drafter over its `breadth` likeliest
    nodes; guesses of log-probability `least` and more are kept. Like all work of the drafter it
    takes a few milliseconds at a time, after which the machine is asked again, and the result goes
    to `TurnMachine.ran`."""

    ids: Sequence[int]
    breadth: int
    least: float


@dataclass(frozen=True, slots=True)
class Write:
    """Find the likeliest token after `ids`: the device writes offline."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for news, at most until `until`, which lies in the future (`Moment`); None: without a
    limit."""

    until: float | None


@dataclass(frozen=True, slots=True)
class Drop:
    """Abort the connection, and continue: its answers do not arrive."""


@dataclass(frozen=True, slots=True)
class End:
    """The turn is over."""

    reason: Reason


Action = Send | Grow | Write | Wait | Drop | End
