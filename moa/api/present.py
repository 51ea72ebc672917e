"""From an answer's events to the text that its client gets in each mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from moa.api.answer import AnswerEvent, Cut, Ended, Mode, Piece, Reading, Reason, Scored, Verified
from moa.api.errors import ApiError

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
                    raise not_verified(f" ({event.reason})" if event.reason in _LOST else "")
                self._text = event.text
                if event.verified or self._mode == "keep":
                    self._verified = len(self._text)
            case _:
                return None
        end = self._verified if self._mode == "hold" else len(self._text)
        text = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        verified = min(self._verified, self._shown)
        untold = self._scored if isinstance(event, Ended) else ()
        if not text and cut is None and verified == self._told and not untold:
            return None
        self._told = verified
        logprobs = self._scored
        self._scored = ()
        return Show(text, verified, cut, logprobs)


async def within_patience(
    events: AsyncGenerator[AnswerEvent, None], mode: Mode, seconds: float, first: float
) -> AsyncGenerator[AnswerEvent, None]:
    """The same events, and an error when there is no token within `first` seconds of the beginning,
    or of the last news that the verifier reads: it is silent, and the device writes nothing.

    In mode hold also when unverified text has waited for `seconds` without any of it being
    verified: the client sees none of it, and a device may write for minutes before its text is
    complete.
    """
    clock = asyncio.get_running_loop().time
    until: float | None = clock() + first
    begun = False
    length = 0
    while True:
        try:
            async with asyncio.timeout_at(until) as limit:
                event = await anext(events)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if limit.expired():
                raise (not_verified() if begun else _no_token()) from None
            raise
        match event:
            case Piece():
                length += len(event.text)
                if event.verified or mode != "hold":
                    until = None
                elif until is None or not begun:
                    until = clock() + seconds
                begun = True
            case Verified():
                until = clock() + seconds if mode == "hold" and event.characters < length else None
            case Cut():
                length = event.characters
                until = None
            case Reading() if until is not None:
                until = max(until, clock() + seconds if begun else clock() + first)
        shown = clock()
        yield event
        if until is not None:
            until += clock() - shown  # a client that reads slowly waits for nobody


def not_verified(why: str = "") -> ApiError:
    """The error of an answer in mode hold."""
    return ApiError(
        503,
        f"the verifier did not come back in time, and unverified text is not sent in mode hold{why}",
        code="not_verified",
        retry_after=5.0,
    )


def _no_token() -> ApiError:
    words = "the verifier did not answer in time, and this device did not write in time either"
    return ApiError(503, words, code="no_answer", retry_after=5.0)
