"""Answers that the device has finished alone are checked when the verifier is back, and their kept
streams corrected.

The target's text is a function of prompt, settings and seed. So an answer is asked for once more,
and what was written is compared with it. Its stream is told what is verified as that becomes known:
the first difference withdraws what follows it, and the target's text comes as the target writes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from moa.api.answer import AnswerEvent, AnswerRequest, Cut, Ended, Piece, Reading, Verified
from moa.api.http import DONE
from moa.api.load import Counted
from moa.api.present import Show
from moa.api.replay import Recording, Recordings
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.errors import MoaError
from moa.safe_text import safe_line
from moa.text_stream import common_prefix

log = logging.getLogger("moa.api")
_RECHECK_SECONDS = 0.5
"""Seconds between two looks at whether the verifier is there."""
_TELL_SECONDS = 0.5
"""Between two remarks on how far the verifier has read what it had verified before."""
_LONGEST_PAUSE = 30.0
"""Seconds before an answer is checked again that could not be verified: from the shortest on they
are doubled each time."""
_MOST_FAILURES = 3
"""Checks of one answer that may fail before it is given up."""


@dataclass
class Correction:
    """What one check makes of the text at a stream's client. Pure."""

    shown: str
    """The text that the client has."""
    told: int = 0
    """How many characters of it the client knows to be verified."""
    differs: bool = False
    """Whether the target's text is another one."""
    _text: str = ""
    """The answer of this check so far."""
    _verified: int = 0
    """How many characters of it are verified."""
    _ends: list[int] = field(default_factory=list)
    """Where each piece of it ends, in characters: one for each token."""

    def take(self, event: AnswerEvent) -> Show | None:
        """Take an event of the check, in which the answer is written once more, and return the
        change of the client's text that it makes, None if it makes none. Until the end only
        verified text counts: what is not may be withdrawn again."""
        match event:
            case Piece():
                self._text += event.text
                self._ends.append(len(self._text))
                if event.verified:
                    self._verified = len(self._text)
            case Verified():
                self._verified = max(self._verified, event.characters)
            case Cut():
                self._text = self._text[: event.characters]
                del self._ends[bisect_right(self._ends, event.characters) :]
                self._verified = min(self._verified, event.characters)
            case Ended():
                return self._ended(event)
            case _:
                return None
        return self._show_verified(self._text[: self._verified])

    @property
    def reading(self) -> Reading | None:
        """How far the verifier has read what the client knows to be verified, in tokens: each check
        begins with the answer's beginning. None once it is past that."""
        if not self._verified < self.told <= len(self._text):
            return None
        return Reading(
            bisect_right(self._ends, self._verified), bisect_right(self._ends, self.told)
        )

    def _show_verified(self, verified: str) -> Show | None:
        """The change that tells the client that this beginning of the answer is verified: only
        that, where it has the same text; else the verified text in place of its own. None if it
        knows."""
        if self.shown.startswith(verified):  # as it was written
            if len(verified) <= self.told:
                return None
            self.told = len(verified)
            return Show("", len(verified))
        self.differs = True
        self.told = len(verified)
        return self._show(verified, len(verified))

    def _ended(self, ended: Ended) -> Show | None:
        """The change at the end of the check. A verified answer replaces the client's text. Where
        the check was cut short, its unverified rest is shown only if the client's text was
        withdrawn already, and None is returned else."""
        if ended.verified:
            return self._show(ended.text, len(ended.text))
        if not self.differs:
            return None
        return self._show(ended.text, min(self._verified, len(ended.text)))

    def _show(self, text: str, verified: int) -> Show:
        """The change that makes the client's text this one, of which so much is verified."""
        common = common_prefix(self.shown, text)
        cut = common if common < len(self.shown) else None
        self.shown = text
        return Show(text[common:], verified, cut)


@dataclass(eq=False)
class Recheck:
    """One resumable answer of mode `provisional`."""

    recording: Recording
    ask: AnswerRequest
    shape: Shape | ResponseShape
    failures: int = 0
    not_before: float = 0.0
    """When it may be checked again."""
    _pause: float = _RECHECK_SECONDS
    """Seconds before the next check, if the latest one verified nothing to the end."""
    _open: bool = field(default=False, init=False)
    """Whether the stream goes on because of this check."""
    _tells_from: float = field(default=0.0, init=False)
    """When it may be told again how far the verifier has read."""

    @property
    def over(self) -> bool:
        """Whether the answer is complete, and is not to be checked any more: it is verified, has
        ended with an error, or its checks have failed too often."""
        if not self.recording.closed:
            return False
        ended = self.shape.ends.get(0)
        if ended is None:  # by an error
            return True
        return ended.verified or self.failures >= _MOST_FAILURES

    def tried(self, now: float) -> None:
        """Note that a check has ended: if it could not verify the answer, the next one waits."""
        self.not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def correct(self, answerer: Counted) -> None:
        """Have the verifier write the answer once more, beside what the device wrote, and correct
        the recorded stream as far as the two differ. Nothing is told if the verifier is gone again
        before it has verified anything. The device keeps its text, and writes none meanwhile."""
        before = self.shape.ends[0]
        correction = Correction(before.text, told=self.shape.verified[0])
        try:
            await self._write_again(answerer, correction, before)
        except Exception as error:
            self.failures += 1
            self._log_failure(error)
        finally:
            if self._open:
                self._end_stream(correction, before)

    async def _write_again(self, answerer: Counted, correction: Correction, before: Ended) -> None:
        """Have the answer written once more, with the text that it had `before` as the prediction,
        and correct the stream as it comes."""
        question = replace(self.ask.question, prediction=before.text)
        ask = replace(
            self.ask, question=question, was_written=True, was_ended=before.reason == "eos"
        )
        encoded = await answerer.encode(ask)
        async with answerer.answering(ask, encoded) as answer:
            async for event in answer.events:
                for counted in answer.counted(event):
                    self._tell(counted, correction)

    def _log_failure(self, error: Exception) -> None:
        """Log why the answer could not be checked."""
        if isinstance(error, MoaError):
            reason = error.line()
            traceback = None
        else:  # a defect of ours
            reason = type(error).__name__
            traceback = error
        log.warning(
            "answer %s could not be checked: %s",
            self.recording.id,
            safe_line(reason),
            exc_info=traceback,
        )

    def _end_stream(self, correction: Correction, before: Ended) -> None:
        """End the stream again, which this check has opened."""
        if not self.shape.ends[0].verified:
            # The client has another text now, of which a part is not verified.
            cut_short = replace(before, text=correction.shown, verified=False)
            self._add(*self.shape.end(0, cut_short))
        self._add(DONE)
        self.recording.close()
        self._open = False

    def _tell(self, event: AnswerEvent, correction: Correction) -> None:
        """Add to the recorded stream what an event of the check changes: in the client's text,
        which `correction` knows, and at the end whether it is verified."""
        if isinstance(event, Reading):
            has_read = event.done >= event.total  # it is at work
            self._add(self.shape.news((has_read and correction.reading) or event))
            return
        show = correction.take(event)
        if show is not None:
            self._add(*self.shape.piece(0, show, last=isinstance(event, Ended)))
        elif isinstance(event, Verified):
            self._tell_reading(correction)
        if isinstance(event, Ended) and event.verified:
            self._add(*self.shape.end(0, event))

    def _tell_reading(self, correction: Correction) -> None:
        """Tell how far the verifier is in what it has verified before, now and then: nothing else
        shows meanwhile that the check runs."""
        now = time.monotonic()
        reading = correction.reading
        if reading is not None and now >= self._tells_from:
            self._tells_from = now + _TELL_SECONDS
            self._add(self.shape.news(reading))

    def _add(self, *events: Any) -> None:
        """Add events to the stream, which goes on with the first one."""
        if events and not self._open:
            self.recording.reopen()
            self._open = True
        for event in events:
            self.recording.add(event)


class Rechecks:
    """The checks of one endpoint."""

    def __init__(self, answerer: Counted, kept: Recordings) -> None:
        self._answerer = answerer
        self._kept = kept
        self._waiting: list[Recheck] = []

    def add(self, recording: Recording, ask: AnswerRequest, shape: Shape | ResponseShape) -> None:
        """Check this answer when it is complete; whoever reads its stream can take text back."""
        # The check's prediction is what was written: the request's own need not be kept.
        ask = replace(ask, question=replace(ask.question, prediction=""))
        recording.size += len(msgspec.json.encode(ask))
        self._kept.sweep()
        self._waiting.append(Recheck(recording, ask, shape))

    async def keep_checking(self) -> None:
        """Check the answers that the device has finished alone, one after another, whenever the
        verifier can be reached. Answers whose streams are no longer kept are forgotten."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_RECHECK_SECONDS)
            kept = set(self._kept)
            self._waiting = [
                recheck
                for recheck in self._waiting
                if recheck.recording in kept and not recheck.over
            ]
            for recheck in self._waiting:
                is_due = recheck.recording.closed and clock() >= recheck.not_before
                if is_due and self._answerer.status()["link"] == "online":
                    await self._run(recheck)
                    recheck.tried(clock())

    async def _run(self, recheck: Recheck) -> None:
        """One check; whoever stops the stream ends it, also before it has told anything."""
        task = asyncio.create_task(recheck.correct(self._answerer))
        recheck.recording.cancel = task.cancel
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
