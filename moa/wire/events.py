"""The events that `ClientSession.receive` returns for messages of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moa.wire.messages import Activations, Append, Error, Finish, Open, Stream, Usage

Request = Open | Append | Stream
"""A message that the server answers."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The server has the prompt (or the next turn)."""

    length: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """Verified `tokens` joined the log after position `base`."""

    round: int
    base: int
    tokens: tuple[int, ...]
    finish: Finish
    done: bool
    queue_ms: float
    forward_ms: float
    drafted: int = 0
    """Nodes of the draft for these tokens, and how many of them are the edge's guesses."""
    foreseen: int = 0
    usage: Usage | None = None
    """With `done`: what the engine behind the verifier has counted for the round, if it told."""


@dataclass(frozen=True, slots=True)
class Working:
    """The server works on the round: `done` of the `total` tokens before it have been read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RecordsArrived:
    """Activation records arrived; `moa.records` reads the payload."""

    message: Activations


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused. If `retry`, it is still valid: send `session.unsettled` again after
    `retry_after`."""

    error: Error
    retry: bool

    @property
    def retry_after(self) -> float:
        """Seconds."""
        return self.error.retry_after_ms / 1000


@dataclass(frozen=True, slots=True)
class Recovered:
    """The session is restored once `resend` is sent. `tokens` are verified tokens that the edge had
    missed."""

    outcome: Literal["resumed", "reprefilled", "gone"]
    base: int
    tokens: tuple[int, ...]
    finish: Finish
    resend: tuple[Request, ...]


SessionEvent = Ready | Advanced | Working | RecordsArrived | Refused | Recovered
