"""From an answer's events to the text that its client gets in each mode."""

from __future__ import annotations

from typing import NamedTuple

from moa.api.answer import AnswerEvent, Cut, Ended, Mode, Piece, Reason, Scored, Verified
from moa.api.errors import ApiError

_LOST: tuple[Reason, ...] = ("guard", "link")
"""Reasons that end an answer only because the verifier was missing, even if all of its text is verified."""


class Show(NamedTuple):
    """A change of the client's text: keep its first `cut` characters (None: all), then append `text`."""

    text: str
    verified: int
    """Characters from the start that will not be withdrawn."""
    cut: int | None = None
    logprobs: tuple[Scored, ...] = ()
    """Of tokens that have been verified since the last change."""


class Presenter:
    """The text of one answer at its client."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._text = ""
        self._verified = 0
        self._shown = 0
        self._told = 0
        self._scored: tuple[Scored, ...] = ()

    def take(self, event: AnswerEvent) -> Show | None:
        """The change of the client's text for this event, if any."""
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
                self._text = self._text[: event.characters]
                self._verified = min(self._verified, event.characters)
                if event.characters < self._shown:
                    cut = self._shown = event.characters
            case Ended():
                if self._mode == "hold" and (not event.verified or event.reason in _LOST):
                    raise _not_verified(event)
                self._text = event.text
                if event.verified or self._mode == "keep":
                    self._verified = len(self._text)
            case _:
                return None
        end = self._verified if self._mode == "hold" else len(self._text)
        text, self._shown = self._text[self._shown : end], max(self._shown, end)
        verified = min(self._verified, self._shown)
        untold = self._scored if isinstance(event, Ended) else ()
        if not text and cut is None and verified == self._told and not untold:
            return None
        self._told, logprobs, self._scored = verified, self._scored, ()
        return Show(text, verified, cut, logprobs)


def _not_verified(event: Ended) -> ApiError:
    why = f" ({event.reason})" if event.reason in _LOST else ""
    return ApiError(
        503,
        f"the verifier did not come back in time, and unverified text is not sent in mode hold{why}",
        code="not_verified",
        retry_after=5.0,
    )
