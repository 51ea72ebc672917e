"""What a verifier needs of an engine behind HTTP: text or tokens that continue a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from cloud_verifier.upstream.joining import AsItIs, Join, Way
from moa.errors import MoaError
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.wire.messages import ChatMessage

Ending = Literal["", "eos", "length", "cut", "done"]
"""Why a continuation has no more: the model ended it, it is as long as was asked for, it broke off,
or its stream is complete and does not say why; "" while it goes on."""


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
    messages: Sequence[ChatMessage] = ()
    """The conversation that the answer belongs to, where the device has told it."""
    begun: str = ""
    """The answer's text so far."""
    begun_tokens: int = 0
    """The device's tokens of it."""
    grammar: Grammar | None = None
    """What the answer must match. An engine's own grammars begin where it begins to write: they are
    of use for an answer from its beginning only."""
    way: Way = "behind"
    """How it is asked for: one of the dialect's `ways`."""
    draft: Sequence[int] = ()
    """Tokens that may come next. Where there are any the engine is to write nothing: it is to tell
    the candidates for the place of each of them, and for the place behind them."""
    candidates: int = 0
    """Likeliest tokens to be told for each place, with their log-probabilities; 0: none are."""

    @property
    def schema(self) -> object:
        """The JSON schema that an answer from its beginning must match; None where there is none."""
        begins = self.way == "anew" or not self.begun
        if self.grammar is None or self.grammar.kind != "json_schema" or not begins:
            return None
        return msgspec.json.decode(self.grammar.text)


class Usage(NamedTuple):
    """Tokens that a request has cost."""

    read: int = 0
    written: int = 0


@dataclass(frozen=True)
class Candidates:
    """What an engine tells of one place of a text."""

    likeliest: tuple[tuple[int, float], ...]
    """Tokens that may come there and their log-probabilities, the likeliest first."""
    own: float = 0.0
    """Log-probability of the token that the engine wrote there."""


class Reading(NamedTuple):
    """How far an engine has read the text before its answer."""

    done: int
    total: int


@dataclass(frozen=True)
class Piece:
    """A part of an answer: tokens where the engine tells them, else text. One without any is a sign
    that the engine is at work."""

    ids: tuple[int, ...] = ()
    text: str = ""
    ending: Ending = ""
    candidates: tuple[Candidates, ...] = ()
    """For the place of each of `ids`, or of a draft, where they were asked for."""
    usage: Usage | None = None
    """Tokens of the whole request so far, where the engine tells them."""
    reading: Reading | None = None
    """How far the text before the answer is read, where the engine tells it."""
    is_complete: bool = False
    """A sign that the answer has ended: its end comes next, with what it has cost."""

    @property
    def is_answer(self) -> bool:
        """Whether it is a part of the answer, or its end."""
        return bool(self.ids or self.text or self.ending or self.candidates)


class UpstreamError(MoaError):
    """The upstream did not do what was asked.

    `later`: it may after `retry_after` seconds, or another upstream may now. Else nothing but a
    person can mend it: a wrong key, an unknown model. `reached`: something answered there, though
    not as it should. `always`: it is so for every request, whatever is asked.
    """

    def __init__(
        self,
        message: str,
        *,
        later: bool = True,
        reached: bool = True,
        always: bool = False,
        retry_after: float = 0.0,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.later = later
        self.reached = reached
        self.always = always
        self.retry_after = retry_after


class RefusedError(UpstreamError):
    """The request as it is: another one may be answered."""

    def __init__(self, message: str) -> None:
        super().__init__(message, later=False)


class NoRouteError(UpstreamError):
    """The upstream has no such route: another kind of request may be answered."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, later=False, always=True, hint=hint)


class NotScoredError(UpstreamError):
    """The upstream does not tell what it thinks of given tokens. It may still write."""

    def __init__(self, message: str) -> None:
        super().__init__(message, later=False)


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
    takes: Literal["tokens", "text", "chat"]
    """What identifies a position: its tokens, its text, or the conversation and the answer's text."""
    scores: ClassVar[bool] = False
    """Whether it tells candidates for given tokens, too, and not only for those that it writes."""
    most_candidates: ClassVar[int] = 0
    """Likeliest tokens that it tells for a place at most, with ids of the device's tokenizer."""
    optional: ClassVar[Mapping[str, str]] = {}
    """Fields that a service may refuse: each is left out then, or sent by this other name."""

    def headers(self, key: str) -> dict[str, str]:
        """A bearer token, if there is a key."""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def ways(self, asked: Continuation) -> Sequence[Way]:
        """Ways to ask, best first: the next one is taken where an answer does not fit, or where the
        service refuses."""
        return ("behind",)

    def join(self, asked: Continuation) -> Join:
        """Where its text joins the one that is there."""
        return AsItIs()

    def path(self) -> str:
        """Where requests go, below the address of the upstream."""

    def tokenize_body(self, text: str, model: str) -> dict[str, object]:
        """The JSON of a request for the tokens of a text, without special ones; asked of engines
        that take tokens, at `../tokenize`."""
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """The JSON of a request."""

    def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """The answer's lines, read."""

    def score_body(self, asked: Continuation, model: str) -> dict[str, object]:
        """The JSON of a request for what the engine thinks of `asked.draft`."""
        raise NotScoredError("the upstream does not score tokens")

    def scored(self, answer: Any, asked: Continuation) -> tuple[Candidates, ...]:
        """Its answer, read: for the place of each token of the draft, and the one behind them."""
        raise NotScoredError("the upstream does not score tokens")
