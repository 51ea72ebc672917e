"""A kept answer that the device has finished alone: when the verifier is back it is checked, and corrected.

The target's text is a function of prompt, settings and seed. So the answer is asked for once more, with what was
written as the prediction, and the kept stream gets the difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from moa.api.answer import AnswerRequest, AnswerSource, Ended
from moa.api.present import Show
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.api.stream import side_by_side
from moa.tokens import common_prefix

_MOST_FAILURES = 3


@dataclass
class Recheck:
    """One kept answer of mode `provisional`."""

    ask: AnswerRequest
    shape: Shape | ResponseShape
    failures: int = 0

    @property
    def size(self) -> int:
        """Bytes that the request holds."""
        question = self.ask.question
        texts = (question.text or "", *(message["content"] for message in question.messages or ()))
        return 4 * len(question.ids or ()) + sum(len(text.encode()) for text in texts)

    @property
    def due(self) -> bool:
        """Whether the answer is complete, and part of it was never verified."""
        return self.shape.unverified is not None and self.failures < _MOST_FAILURES

    async def events(self, answerer: AnswerSource) -> AsyncGenerator[Any, None]:
        """What corrects the stream; nothing if the verifier is gone again."""
        written = self.shape.unverified or ""
        question = replace(self.ask.question, prediction=written)
        ended = None
        async with contextlib.aclosing(side_by_side(answerer, [replace(self.ask, question=question)])) as events:
            async for _, event in events:
                ended = event if isinstance(event, Ended) else ended
        if ended is None or not ended.verified:
            return
        self.shape.unverified = None
        same = common_prefix(written, ended.text)
        show = Show(ended.text[same:], len(ended.text), same if same < len(written) else None)
        for told in (*self.shape.piece(0, show, marked=True, last=True), *self.shape.end(0, ended)):
            yield told
