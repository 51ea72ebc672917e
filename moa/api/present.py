"""From an answer's events to the text that its client gets in each mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from moa.api.answer import AnswerEvent, Cut, Ended, Mode, Piece, Reading, Reason, Scored, Verified
from moa.api.errors import ApiError

Event = TypeVar("Event")
_LOST: tuple[Reason, ...] = ("guard", "link")
"""Reasons that end an answer only because the verifier was missing, even if all of its text is
verified."""


class Show(NamedTuple):
    """A change of the client's text: keep its first `cut` characters (None: all), then append
    `text`."""

    text: str
    verified: int
    """Characters from the start that will not be withdrawn."""
    cut: int | None = None
    logprobs: tuple[Scored, ...] = ()
    """Of tokens that have been verified since the last change."""


@dataclass
class _AtClient:
    """What the client of an answer has."""

    shown: int = 0
    """Characters of the text."""
    verified: int = 0
    """How many of them it knows to be verified."""


class Presenter:
    """The text of one answer at its client."""

    def __init__(self, mode: Mode) -> None:
        """Begin with an empty text. The mode says whether the client gets text that is not verified
        yet."""
        self._mode = mode
        self._text = ""
        """All of the text."""
        self._verified = 0
        """How many characters of it will not be withdrawn."""
        self._client = _AtClient()
        self._scored: tuple[Scored, ...] = ()
        """Log-probabilities that the client does not have yet."""

    def take(self, event: AnswerEvent) -> Show | None:
        """Take an event of the answer, and return the change of the client's text that it makes,
        None if it makes none. In mode `hold` the client gets verified text alone; else all text, as
        it comes, with news of how much of it is verified."""
        cut = None
        match event:
            case Piece():
                self._text += event.text
                self._scored += event.logprobs
                if event.verified:
                    self._verified = len(self._text)
            case Verified():
                self._scored += event.logprobs
                self._verified = max(self._verified, event.characters)
            case Cut():
                cut = self._cut(event.characters)
            case Ended():
                self._end(event)
            case _:
                return None
        return self._change(cut, is_end=isinstance(event, Ended))

    def _cut(self, characters: int) -> int | None:
        """Keep so many characters of the text. Returns how many of its own the client must keep,
        None if it has no more than these."""
        self._text = self._text[:characters]
        self._verified = min(self._verified, characters)
        if self._client.shown <= characters:
            return None
        self._client.shown = characters
        return characters

    def _end(self, ended: Ended) -> None:
        """Take over the whole text of an answer that has ended; raise if mode `hold` cannot show
        it."""
        if self._mode == "hold":
            _raise_if_not_verified(ended)
        self._text = ended.text
        if ended.verified or self._mode == "keep":
            self._verified = len(self._text)

    def _change(self, cut: int | None, *, is_end: bool) -> Show | None:
        """Returns the change that brings the client's text up to date; None if it is. At the
        answer's end (`is_end`) log-probabilities do not wait for a change."""
        client = self._client
        end = self._verified if self._mode == "hold" else len(self._text)
        new_text = self._text[client.shown : end]
        client.shown = max(client.shown, end)
        verified = min(self._verified, client.shown)
        is_change = bool(new_text) or cut is not None or verified != client.verified
        must_send_logprobs = is_end and bool(self._scored)
        if not is_change and not must_send_logprobs:
            return None
        client.verified = verified
        logprobs = self._scored
        self._scored = ()
        return Show(new_text, verified, cut, logprobs)


class Patience:
    """How long the client of one answer waits for the next event. Pure: the caller passes times.

    It waits for a first token, or for the next news that the verifier reads: a verifier may be
    silent while the device writes nothing. In mode hold it also waits, while there is unverified
    text, for any of that to be verified: the client sees none of it, and a device may write for
    minutes before its text is complete. For all else it waits for ever.
    """

    def __init__(self, mode: Mode, *, seconds: float, first: float, now: float) -> None:
        """Begin to wait at the time `now`: `first` seconds for the first token, and in mode `hold`
        `seconds` for unverified text to be verified."""
        self.deadline: float | None = now + first
        """When the next event comes too late; None: never."""
        self.trouble = ""
        """Why text is not verified, in words, as far as is known; the caller sets it."""
        self.refused = False
        """Whether that is a refusal, which to wait does not mend; the caller sets it."""
        self._mode = mode
        self._seconds = seconds
        self._first = first
        self._has_text = False
        self._length = 0
        """Characters of the text so far."""

    def take(self, event: AnswerEvent, now: float) -> None:
        """Take an event that has come, and set the time (`deadline`) at which the next one is too
        late."""
        match event:
            case Piece():
                self._length += len(event.text)
                if event.verified or self._mode != "hold":
                    self.deadline = None
                elif self.deadline is None or not self._has_text:
                    # The first unverified text; more of it does not prolong the time.
                    self.deadline = now + self._seconds
                self._has_text = True
            case Verified():
                waits = self._mode == "hold" and event.characters < self._length
                self.deadline = now + self._seconds if waits else None
            case Cut():
                self._length = event.characters
                self.deadline = None
            case Reading() if self.deadline is not None:
                more = self._seconds if self._has_text else self._first
                self.deadline = max(self.deadline, now + more)

    def client_took(self, seconds: float) -> None:
        """The client has read the latest event for so long, in which nobody waited for another."""
        if self.deadline is not None:
            self.deadline += seconds

    def too_late(self) -> ApiError:
        """The error of an answer whose next event did not come in time."""
        if self._has_text:
            return not_verified(self.trouble, refused=self.refused)
        return _no_token(self.trouble, refused=self.refused)


async def next_in_time(events: AsyncGenerator[Event, None], patience: Patience) -> Event | None:
    """Wait for the next event of an answer and return it, None after the last one. When the
    deadline of the client's patience has come, the error is raised that says what was late."""
    try:
        async with asyncio.timeout_at(patience.deadline) as limit:
            return await anext(events, None)
    except TimeoutError:
        if not limit.expired():
            raise  # one of the answerer's own
        raise patience.too_late() from None


def _raise_if_not_verified(ended: Ended) -> None:
    """Raise if mode hold cannot show the whole answer."""
    if ended.reason in _LOST:
        raise not_verified(ended.why, f" ({ended.reason})", refused=ended.refused)
    if not ended.verified:
        raise not_verified(ended.why, refused=ended.refused)


_RETRY_SECONDS = 5.0
"""After which a client that got no answer may ask again."""


def not_verified(why: str = "", remark: str = "", *, refused: bool = False) -> ApiError:
    """The error of an answer in mode hold that the verifier has not verified, for this reason; the
    `remark` stands at its end. `refused`: to wait does not mend it."""
    what = f"the text was not verified ({why})" if why else "the text was not verified in time"
    return ApiError(
        503,
        f"{what}, and unverified text is not sent in mode hold{remark}",
        code="not_verified",
        retry_after=0.0 if refused else _RETRY_SECONDS,
        why=why,
    )


def _no_token(why: str, *, refused: bool) -> ApiError:
    """The error of an answer that nobody began, for this reason; `refused`: to wait does not mend
    it."""
    return ApiError(
        503,
        "no answer came in time, and this device did not write in time either"
        + (f": {why}" if why else ""),
        code="no_answer",
        retry_after=0.0 if refused else _RETRY_SECONDS,
        why=why,
    )
