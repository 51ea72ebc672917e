"""From an answer's events to the text that its client gets in each mode; and thinking apart from the answer: text in
`<think>` at its beginning, or up to `</think>` where the prompt has opened it, as some templates do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from moa.api.answer import AnswerEvent, Cut, Ended, Mode, Piece, Reason, Scored, Verified
from moa.api.errors import ApiError
from moa.api.tools import ToolFormat, WrittenCall
from moa.text_stream import common_prefix

_OPEN, _CLOSE = "<think>", "</think>"
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
                    raise not_verified(f" ({event.reason})" if event.reason in _LOST else "")
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


async def within_patience(
    events: AsyncGenerator[AnswerEvent, None], mode: Mode, seconds: float, first: float
) -> AsyncGenerator[AnswerEvent, None]:
    """The same events; an error when there is no token within `first` seconds: the verifier is silent, and the device
    cannot write. In mode hold also when unverified text has waited for `seconds` without any of it being verified: the
    client sees none of it, and a device may write for minutes before its text is complete."""
    clock = asyncio.get_running_loop().time
    until: float | None = clock() + first
    begun, length = False, 0
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
                length, until = event.characters, None
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
    words = "the verifier did not answer in time, and this device cannot write alone"
    return ApiError(503, words, code="no_answer", retry_after=5.0)


def split(text: str, *, thinking: bool = False, last: bool = True) -> tuple[str, str]:
    """The reasoning and the answer. Of a text that still grows (not `last`), what may be the beginning of a tag is left
    out, so that both only grow with it."""
    if not thinking:
        begun = text.lstrip()
        if not begun.startswith(_OPEN):
            undecided = not last and _OPEN.startswith(begun)
            return "", "" if undecided else text
        text = begun[len(_OPEN) :].lstrip("\n")
    reasoning, closed, answer = text.partition(_CLOSE)
    if closed or last:
        return reasoning, answer.lstrip("\n")
    return reasoning[: len(reasoning) - _tail(reasoning)], ""


def within_thinking(prompt: str, begun: str) -> bool:
    """Whether the model begins by thinking: after this prompt, and this beginning of its answer."""
    opened = _OPEN if prompt.rstrip().endswith(_OPEN) else ""
    begun = (opened + begun).lstrip()
    return begun.startswith(_OPEN) and _CLOSE not in begun


def _tail(text: str) -> int:
    """Characters at the end with which the closing tag may begin."""
    return next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)


class Separator:
    """One choice's text at its client, as reasoning, answer and calls."""

    def __init__(self, *, separate: bool = True, thinking: bool = False, form: ToolFormat | None = None) -> None:
        """Without `separate` all of the text is the answer; `thinking`: the prompt has opened it; `form`: how the model
        writes calls, which are taken out of the answer."""
        self._separate, self._thinking, self._form = separate, thinking, form
        self.calls: list[WrittenCall] = []
        """The complete calls of the latest text."""
        self._text, self._verified = "", 0
        self._sent = ["", ""]

    def split(self, text: str, *, last: bool = True) -> tuple[str, str]:
        """A whole text."""
        reasoning, answer = split(text, thinking=self._thinking, last=last) if self._separate else ("", text)
        if self._form is not None:
            answer, self.calls, rest = self._form.split(answer, last=last)
            answer += rest if last else ""
        return reasoning, answer

    def take(self, show: Show | None, *, last: bool = False) -> tuple[Show, Show]:
        """The changes of reasoning and answer; the `last` one brings what was held back."""
        if show is not None:
            self._text, self._verified = self._text[: show.cut] + show.text, show.verified
        sure = self.split(self._text[: self._verified], last=last and self._verified == len(self._text))
        new = self.split(self._text, last=last)
        parts = [_change(*texts) for texts in zip(self._sent, new, sure, strict=True)]
        self._sent = list(new)
        return parts[0], parts[1]


def _change(old: str, new: str, sure: str) -> Show:
    same = common_prefix(old, new)
    return Show(new[same:], len(sure), same if same < len(old) else None)
