"""The events of a generation, in order. Positions are indices into the whole token log, prompt
included."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from moa.logprobs import TokenLogprobs

Status = Literal["verified", "provisional"]
LinkState = Literal["none", "connecting", "online", "late", "limited", "offline", "refused"]
"""none: offline on purpose. late: connected, but the answer is overdue. limited: connected, but this
user has used up what he may have of the verifier a second, and gets no more than that. offline: not
connected, or the verifier says that the engine behind it does not answer. refused: the verifier
refused the client."""
OVERDUE: Final = ("late", "limited")
"""States in which the verifier is there, and its text is waited for."""
Reason = Literal["eos", "stop", "length", "context", "cancelled", "guard", "link"]
"""Why a turn ended. guard: too many offline tokens for good quality. link: lost, and the device
could not continue."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base of all events; `msgspec.to_builtins(event)` is its JSON."""


class Prompt(Event, frozen=True, kw_only=True):
    """The turn's context is known: every id before the first output token."""

    ids: list[int]


class Token(Event, frozen=True, kw_only=True, omit_defaults=True):
    """One output token. `text` is what it adds; it may be empty while a character is incomplete. A
    verified token has the target's log-probabilities when they were asked for."""

    position: int
    id: int
    text: str
    status: Status
    logprobs: TokenLogprobs | None = None


class Confirm(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Provisional tokens at start..stop (exclusive) are the target's own. `logprobs`: of each of
    them, or empty."""

    start: int
    stop: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class Retract(Event, frozen=True, kw_only=True):
    """Provisional tokens at start..stop (exclusive) are withdrawn; `characters` of the turn's text
    remain."""

    start: int
    stop: int
    characters: int


class Adopt(Event, frozen=True, kw_only=True):
    """Provisional tokens at start..stop (exclusive) stay although the target would have continued
    differently."""

    start: int
    stop: int


class Link(Event, frozen=True, kw_only=True):
    """The state of the link changed."""

    state: LinkState
    detail: str = ""
    for_now: bool = False
    """Of `refused`: the verifier was given up because it failed too often in a row, and may answer the
    next question. Else somebody has to change something first."""


class Progress(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The verifier is reading: `done` of the `total` tokens before the answer, or before the text
    that it checks; or the device is, which answers alone. Sent only where it takes long. With all of
    them read, it is at work on a check: that is said again and again."""

    done: int
    total: int
    by: Literal["verifier", "device"] = "verifier"


class Notice(Event, frozen=True, kw_only=True):
    """A message for the user: quality, a degraded service."""

    message: str


class Done(Event, frozen=True, kw_only=True):
    """The turn is over. If not `verified`, some of its tokens were never verified."""

    reason: Reason
    verified: bool
    text: str
    stats: dict[str, Any]


class AnswerSoFar:
    """An answer as its events have told it so far."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.texts: list[str] = []
        """What each token has added."""
        self.statuses: list[Status] = []
        self.final = 0
        """Tokens from the beginning that cannot be withdrawn any more: verified, or adopted."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By position, of the verified tokens, if they were asked for."""
        self.trouble: Link | None = None
        """The state of the link that says why some of it is not verified, if that is so; None where
        nothing was said of the link."""
        self.was_away = False
        """Whether the verifier was away meanwhile, and not only late."""
        self.done: Done | None = None

    def copy(self) -> AnswerSoFar:
        """The same answer, which changes no more with this one."""
        same = AnswerSoFar()
        same.prompt = list(self.prompt)
        same.ids = list(self.ids)
        same.texts = list(self.texts)
        same.statuses = list(self.statuses)
        same.final = self.final
        same.logprobs = dict(self.logprobs)
        same.trouble = self.trouble
        same.was_away = self.was_away
        same.done = self.done
        return same

    def take(self, event: Event) -> None:
        """Take in the next event: add, confirm or withdraw tokens."""
        start = len(self.prompt)
        match event:
            case Prompt():
                self.prompt = event.ids
            case Token():
                self.ids.append(event.id)
                self.texts.append(event.text)
                self.statuses.append(event.status)
                if event.logprobs is not None:
                    self.logprobs[event.position] = event.logprobs
            case Confirm():
                verified: list[Status] = ["verified"] * (event.stop - event.start)
                self.statuses[event.start - start : event.stop - start] = verified
                self.logprobs |= zip(range(event.start, event.stop), event.logprobs, strict=False)
            case Adopt():
                self.final = event.stop - start
            case Retract():
                for told in (self.ids, self.texts, self.statuses):
                    del told[event.start - start :]
                self.final = min(self.final, len(self.ids))
            case Link():
                self._hear(event)
            case Done():
                self.done = event
            case _:
                pass
        while self.final < len(self.statuses) and self.statuses[self.final] == "verified":
            self.final += 1

    def _hear(self, link: Link) -> None:
        """Note a state of the link. A verifier that comes back in mid-answer is late until it has
        read what it missed: that is not why the text before is the device's own."""
        is_back = link.state == "late" and not link.detail
        was_down = self.trouble is not None and self.trouble.state not in ("online", *OVERDUE)
        if not (is_back and was_down and "provisional" in self.statuses):
            self.trouble = link
        self.was_away |= link.state in ("offline", "refused")

    @property
    def unverified(self) -> int:
        """Tokens that are not verified, nor adopted: what a person reads of an answer that goes on.
        Programs get `unverified_tokens`, which counts adopted ones as well."""
        if self.done is not None and self.done.verified:
            return 0
        return len(self.ids) - self.final

    @property
    def verified_beginning(self) -> int:
        """Tokens from the beginning that are verified; adopted ones are not."""
        for count, status in enumerate(self.statuses):
            if status != "verified":
                return count
        return len(self.statuses)

    def text_of(self, start: int = 0, stop: int | None = None) -> str:
        """The text of tokens start..stop."""
        return "".join(self.texts[start:stop])
