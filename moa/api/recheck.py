"""Answers that the device has finished alone are checked when the verifier is back, and their kept
streams corrected.

The target's text is a function of prompt, settings and seed. So an answer is asked for once more,
with what was written as the prediction. Its stream is told what is verified as that becomes known:
the first difference withdraws what follows it, and the target's text comes as the target writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from moa.api.answer import AnswerEvent, AnswerRequest, Cut, Ended, Piece, Reading, Verified
from moa.api.load import Counted
from moa.api.present import Show
from moa.api.replay import Recording, Recordings
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.api.stream import side_by_side
from moa.errors import MoaError
from moa.safe_text import safe_line
from moa.text_stream import common_prefix

log = logging.getLogger("moa.api")
_RECHECK_SECONDS = 0.5
_MOST_FAILURES = 3


@dataclass
class Correction:
    """What one check makes of the text at a stream's client. Pure."""

    shown: str
    """The text that the client has."""
    differs: bool = False
    _text: str = ""
    """The answer of this check so far."""
    _verified: int = 0
    """How much of it is verified."""
    _told: int = 0
    """How much of that the client was told."""

    def take(self, event: AnswerEvent) -> Show | None:
        """The change of the client's text for this event of the check, if any: only what is
        verified counts, until the end."""
        match event:
            case Piece():
                self._text += event.text
                if event.verified:
                    self._verified = len(self._text)
            case Verified():
                self._verified = max(self._verified, event.characters)
            case Cut():
                self._text = self._text[: event.characters]
                self._verified = min(self._verified, event.characters)
            case Ended():
                return self._ended(event)
            case _:
                return None
        return self._show(self._text[: self._verified])

    def _show(self, sure: str) -> Show | None:
        if len(sure) <= self._told:
            return None
        same = common_prefix(self.shown, sure)
        self._told = len(sure)
        if same == len(sure):  # as it was written
            return Show("", len(sure))
        cut = same if same < len(self.shown) else None
        self.differs = True
        self.shown = sure
        return Show(sure[same:], len(sure), cut)

    def _ended(self, ended: Ended) -> Show | None:
        """All of a verified answer; what else is there of one that was begun anew."""
        if not ended.verified and not self.differs:
            return None
        same = common_prefix(self.shown, ended.text)
        cut = same if same < len(self.shown) else None
        self.shown = ended.text
        verified = len(ended.text) if ended.verified else min(self._verified, len(ended.text))
        return Show(ended.text[same:], verified, cut)


@dataclass(eq=False)
class Recheck:
    """One resumable answer of mode `provisional`."""

    recording: Recording
    ask: AnswerRequest
    shape: Shape | ResponseShape
    failures: int = 0
    _open: bool = field(default=False, init=False)
    """Whether the stream goes on because of this check."""

    @property
    def over(self) -> bool:
        """Whether the answer is complete, and there is nothing more to check."""
        ended = self.shape.ends.get(0)
        return self.recording.closed and (
            ended is None or ended.verified or self.failures >= _MOST_FAILURES
        )

    async def correct(self, answerer: Counted) -> None:
        """Tell the stream what the verifier says of the answer, as it says it; nothing if it is
        gone again before it has verified anything."""
        before = self.shape.ends[0]
        correction = Correction(before.text)
        question = replace(self.ask.question, prediction=before.text)
        ask = replace(self.ask, question=question)
        try:
            async with contextlib.aclosing(side_by_side(answerer, [ask])) as events:
                async for _, event in events:
                    self._tell(event, correction)
        except Exception as error:
            self.failures += 1
            why = error.line() if isinstance(error, MoaError) else type(error).__name__
            log.warning(
                "answer %s could not be checked: %s",
                self.recording.id,
                safe_line(why),
                exc_info=None if isinstance(error, MoaError) else error,
            )
        finally:
            if self._open:
                if not self.shape.ends[0].verified:
                    # The client has another text now, of which a part is not verified.
                    cut_short = replace(before, text=correction.shown, verified=False)
                    self._add(*self.shape.end(0, cut_short))
                self._add("[DONE]")
                self.recording.close()
                self._open = False

    def _tell(self, event: AnswerEvent, correction: Correction) -> None:
        if isinstance(event, Reading):
            self._add(self.shape.news(event))
            return
        show = correction.take(event)
        if show is not None:
            self._add(*self.shape.piece(0, show, last=isinstance(event, Ended)))
        if isinstance(event, Ended) and event.verified:
            self._add(*self.shape.end(0, event))

    def _add(self, *events: Any) -> None:
        if events and not self._open:
            self.recording.reopen()
            self._open = True
        for event in events:
            self.recording.add(event)


class Rechecks:
    """Those of one endpoint."""

    def __init__(self, answerer: Counted, kept: Recordings) -> None:
        self._answerer = answerer
        self._kept = kept
        self._waiting: list[Recheck] = []

    def add(self, recording: Recording, ask: AnswerRequest, shape: Shape | ResponseShape) -> None:
        """Check this answer when it is complete; whoever reads its stream can take text back."""
        ask = replace(ask, question=replace(ask.question, prediction=""))
        recording.size += len(msgspec.json.encode(ask))
        self._kept.sweep()
        self._waiting.append(Recheck(recording, ask, shape))

    async def keep_checking(self) -> None:
        """Whenever the verifier is there, check what the device has finished alone."""
        while True:
            await asyncio.sleep(_RECHECK_SECONDS)
            kept = set(self._kept)
            self._waiting = [one for one in self._waiting if one.recording in kept and not one.over]
            for recheck in self._waiting:
                if recheck.recording.closed and self._answerer.status()["link"] == "online":
                    await recheck.correct(self._answerer)
