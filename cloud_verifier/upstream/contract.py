"""What a verifier needs of an engine behind HTTP: text or tokens that continue a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moa.errors import MoaError
from moa.sampling import SamplingSettings

Ending = Literal["", "eos", "length", "cut"]
"""Why a continuation has no more: the model ended it, it is as long as was asked for, or it broke
off; "" while it goes on."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A request: what comes after these tokens."""

    ids: Sequence[int]
    """All tokens so far, the device's."""
    text: str
    """The same as text, special tokens included."""
    sampling: SamplingSettings
    most: int
    """Tokens at most."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer: tokens where the engine tells them, else text."""

    ids: tuple[int, ...] = ()
    text: str = ""
    ending: Ending = ""


class UpstreamError(MoaError):
    """The upstream did not do what was asked.

    `later`: it may after `retry_after` seconds, or another upstream may now. Else nothing but a
    person can mend it: a wrong key, an unknown model.
    """

    def __init__(
        self, message: str, *, later: bool = True, retry_after: float = 0.0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.later = later
        self.retry_after = retry_after


class TooLongError(UpstreamError):
    """The prompt does not fit into the upstream's context."""

    def __init__(self, message: str) -> None:
        super().__init__(message, later=False)


@dataclass(frozen=True, kw_only=True)
class UpstreamFacts:
    """What an upstream says of itself."""

    model: str
    owner: str = ""
    """Which engine it is, as its list of models has it."""


class Dialect(Protocol):
    """How one kind of engine is asked."""

    name: str
    takes: Literal["tokens", "text"]
    """What identifies a position: its tokens, or only its text."""

    def path(self) -> str:
        """Where requests go, below the address of the upstream."""

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """The JSON of a request."""

    def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """The answer's lines, read."""
