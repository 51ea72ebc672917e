"""The protocol between the routes and an answerer: the request for one answer, and the events that
come back.

Positions in the text count characters (Unicode code points) of the answer, so that a client needs
no tokenizer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from moa.api.calls import CallReader
from moa.api.tools import Tools
from moa.grammar.spec import Grammar

Mode = Literal["hold", "provisional", "keep"]
"""What happens to text that the target has not verified. hold: it is not sent. provisional: it is
sent, marked, and may be retracted. keep: it is sent, and stays whatever the target says later."""
Reason = Literal["eos", "stop", "length", "context", "cancelled", "guard", "link"]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt: one of `messages`, `text` and `ids`. All choices of a request share it, and it is
    encoded once."""

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    prediction: str = ""
    """Text that the answer is likely to contain: a draft for the target to verify."""
    template: Mapping[str, Any] = {}
    """Variables for the chat template, such as `enable_thinking`."""
    tools: Tools | None = None
    may_trim: bool = True
    """Whether a chat that outgrows the context may lose its oldest turns."""

    def call_reader(self) -> CallReader | None:
        """Returns what finds the calls in one answer; None if it may have none."""
        if self.tools is None or self.tools.choice == "none":
            return None
        return self.tools.reader()


class Encoded(NamedTuple):
    """A question in tokens."""

    ids: Sequence[int]
    prediction: Sequence[int] = ()
    thinking: bool = False
    """Whether the prompt ends within `<think>`, which some templates open."""
    grammar: Grammar | None = None
    """What the answer must match."""
    left_out: int = 0
    """The oldest messages that are not sent because the context is full."""
    messages: Sequence[Mapping[str, str]] = ()
    """The chat that the ids are of as plain text, tools and calls included."""


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
)
"""The fields of an `AnswerRequest` that say how tokens are chosen; `SamplingSettings` and the device's
settings have them by the same names."""


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one answer. None means the answerer's default."""

    question: Question
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool | None = None
    mode: Mode = "keep"
    logprobs: int | None = None
    """How many of the likeliest tokens to return with each token's own log-probability; None: none
    at all."""
    patience: float = 1.0
    """Seconds to wait at the end for a lost link, so that the text can be verified."""
    principal: str = ""
    peer: str = ""
    """The address of whoever asks, for the log."""
    grammar: Grammar | None = None
    """What the answer must match, unless it is a call."""
    was_written: bool = False
    """Whether the predicted text is this answer, as it was written before: it is to be checked, and
    not written again. It is whole if `was_ended`."""
    was_ended: bool = False


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an answer."""

    prompt_tokens: int
    tokens: int
    drafted: int = 0
    accepted: int = 0
    calls: int = 0
    forwards: int = 0
    """Forwards of the target that brought tokens, whoever had drafted for them."""
    forward_tokens: int = 0
    """Tokens that these brought."""
    predicted: int = 0
    """Tokens of the prediction that were drafted."""
    predicted_accepted: int = 0
    """How many of them were accepted."""
    unverified: int = 0
    """Tokens that nobody has verified."""
    more: dict[str, Any] = {}
    """Figures of the answerer's own."""


class Began(msgspec.Struct, frozen=True):
    """The prompt is encoded and fits; `thinking`: it ends within `<think>`."""

    thinking: bool = False


class Scored(msgspec.Struct, frozen=True):
    """The log-probabilities that the target gave a token and the likeliest beside it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Piece(msgspec.Struct, frozen=True):
    """The next piece of text."""

    text: str
    verified: bool = True
    logprobs: tuple[Scored, ...] = ()


class Verified(msgspec.Struct, frozen=True):
    """The first `characters` will not be withdrawn: they are verified or adopted."""

    characters: int
    logprobs: tuple[Scored, ...] = ()


class Cut(msgspec.Struct, frozen=True):
    """All but the first `characters` are withdrawn."""

    characters: int


class LinkNews(msgspec.Struct, frozen=True):
    """The state of the link to the verifier changed."""

    state: str
    detail: str = ""


class Reading(msgspec.Struct, frozen=True):
    """The verifier is reading: `done` of the `total` tokens before the answer, or before the text
    that it checks. Or the device is, before it can write alone. All of them: the verifier is at work
    on a check."""

    done: int
    total: int
    by: str = "verifier"
    """Who reads: `verifier` or `device`."""


class Note(msgspec.Struct, frozen=True):
    """A message for the user."""

    message: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The answer is complete. `text` is the whole answer; if not `verified`, part of it was never
    verified."""

    reason: Reason
    verified: bool
    text: str
    counts: Counts
    why: str = ""
    """Why a part of it was not verified, or whose limit has cut it, in words, as far as that is
    known and not plain."""
    refused: bool = False
    """Whether that is because of a refusal, such as of a key: to wait does not mend it."""


AnswerEvent = Began | Piece | Verified | Cut | LinkNews | Reading | Note | Ended


class Answerer(Protocol):
    """One end's answers, and what the endpoint tells of it. Errors are `MoaError`s."""

    async def encode(self, ask: AnswerRequest) -> Encoded:
        """The question in tokens, encoded in a thread; a `UsageError` if it does not fit the
        context."""

    async def admit(self, ask: AnswerRequest, encoded: Encoded) -> None:
        """Refuse, before a stream begins, a question whose grammar cannot be followed."""

    def answer(self, ask: AnswerRequest, encoded: Encoded) -> AsyncGenerator[AnswerEvent, None]:
        """`Began` first, `Ended` last. Many may run at once; closing a generator stops its work at
        once."""

    @property
    def model(self) -> str:
        """The name of the model whose text it is."""

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer: a `moa.api.tokens.TokenTexts`."""

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""

    def status(self) -> dict[str, Any]:
        """The state of link and load, as numbers."""

    def not_ready(self) -> str:
        """Empty if it can answer, else the problem."""

    async def unverified(self) -> str:
        """Why the text of an answer would not be verified now; empty if it would. What is not known
        is looked after first, for a moment."""
