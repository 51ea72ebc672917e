"""Answers that the device has finished alone are checked when the verifier is back, and their kept
streams corrected.

The target's text is a function of prompt, settings and seed. So an answer is asked for once more,
with what was written as the prediction, and its stream gets the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from moa.api.answer import AnswerRequest, Ended
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


@dataclass(eq=False)
class Recheck:
    """One resumable answer of mode `provisional`."""

    recording: Recording
    ask: AnswerRequest
    shape: Shape | ResponseShape
    failures: int = 0

    @property
    def over(self) -> bool:
        """Whether the answer is complete, and there is nothing more to check."""
        ended = self.shape.ends.get(0)
        return self.recording.closed and (
            ended is None or ended.verified or self.failures >= _MOST_FAILURES
        )

    async def correct(self, answerer: Counted) -> None:
        """Append what the verifier says of the answer; nothing if it is gone again."""
        try:
            told = await self._correction(answerer)
        except Exception as error:
            self.failures += 1
            why = error.line() if isinstance(error, MoaError) else type(error).__name__
            log.warning(
                "answer %s could not be checked: %s",
                self.recording.id,
                safe_line(why),
                exc_info=None if isinstance(error, MoaError) else error,
            )
            return
        if told:
            self.recording.reopen()
            for event in (*told, "[DONE]"):
                self.recording.add(event)
            self.recording.close()

    async def _correction(self, answerer: Counted) -> list[Any]:
        written = self.shape.ends[0].text
        question = replace(self.ask.question, prediction=written)
        ended = None
        async with contextlib.aclosing(
            side_by_side(answerer, [replace(self.ask, question=question)])
        ) as events:
            async for _, event in events:
                ended = event if isinstance(event, Ended) else ended
        if ended is None or not ended.verified:
            return []
        same = common_prefix(written, ended.text)
        show = Show(ended.text[same:], len(ended.text), same if same < len(written) else None)
        return [*self.shape.piece(0, show, last=True), *self.shape.end(0, ended)]


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
