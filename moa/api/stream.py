"""Answers for one client: several choices in parallel, whole or as a stream of chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from moa.api.answer import (
    AnswerEvent,
    AnswerRequest,
    Began,
    Encoded,
    Ended,
    LinkNews,
    Note,
    Piece,
    Reading,
)
from moa.api.errors import ApiError, from_error
from moa.api.http import DONE, Comment
from moa.api.load import Counted
from moa.api.present import Presenter, Show
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.errors import MoaError

_WAITING = 64
"""Events of a request with several choices that may wait for a slow client; then the choices pause."""


async def streamed(
    asks: Sequence[AnswerRequest],
    shape: Shape | ResponseShape,
    answerer: Counted,
    refused: Callable[[ApiError], object] = lambda error: None,
) -> AsyncGenerator[Any, None]:
    """Yield what the client of a request is sent: chunks of its answers, which are written side by
    side, and the mark of the end. An error before an answer has begun is raised; a later one
    becomes the last event before the mark, and `refused` is told of it."""
    client = _StreamClient(asks, shape)
    try:
        encoded = await _encoded(asks, answerer)
        if len(asks) == 1:
            async with answerer.answering(asks[0], encoded[0]) as answer:
                async for event in answer.events:
                    for chunk in client.chunks(0, answer.counted(event)):
                        yield chunk
                    await client.pause()
        else:
            async with _side_by_side(asks, encoded, answerer) as answers:
                while (news := await answers.next()) is not None:
                    for chunk in client.chunks(*news):
                        yield chunk
                    await client.pause()
    except MoaError as error:
        if not client.has_begun:
            raise  # becomes the status of the response
        refusal = from_error(error)
        refused(refusal)
        yield shape.fail(refusal)
    yield DONE


class _StreamClient:
    """What the client of one stream has been sent. It makes chunks of the answers' events."""

    def __init__(self, asks: Sequence[AnswerRequest], shape: Shape | ResponseShape) -> None:
        self.has_begun = False
        """Whether an answer has begun: then it is too late for an error status."""
        self._shape = shape
        self._presenters = [Presenter(ask.mode) for ask in asks]
        self._wrote_logprobs = False

    def chunks(self, index: int, events: Sequence[AnswerEvent]) -> list[Any]:
        """Returns what the client is sent for these events of one choice (answer)."""
        chunks = []
        for event in events:
            self.has_begun = self.has_begun or isinstance(event, Began)
            show = self._presenters[index].take(event)
            if show is not None and show.logprobs:
                self._wrote_logprobs = True
            chunks += _shaped(index, event, show, self._shape)
        return chunks

    async def pause(self) -> None:
        """Let other tasks run after log-probabilities: those of thousands of tokens take a second
        to write."""
        if self._wrote_logprobs:
            self._wrote_logprobs = False
            await asyncio.sleep(0)


async def _encoded(asks: Sequence[AnswerRequest], answerer: Counted) -> list[Encoded]:
    """The question of each request in tokens. Choices share theirs, which is encoded once."""
    by_question: dict[int, Encoded] = {}
    for ask in asks:
        if id(ask.question) not in by_question:
            by_question[id(ask.question)] = await answerer.encode(ask)
    return [by_question[id(ask.question)] for ask in asks]


class _SideBySide:
    """The events of several answers that are written at once."""

    def __init__(self, answers: int) -> None:
        self._running = answers
        """How many of them have not ended."""
        # An exception or None is the last of an answer.
        self._queue: asyncio.Queue[tuple[int, Sequence[AnswerEvent] | Exception | None]]
        self._queue = asyncio.Queue(_WAITING)

    async def feed(self, index: int, ask: AnswerRequest, encoded: Encoded, by: Counted) -> None:
        """Have one of the answers written, to its end."""
        try:
            async with by.answering(ask, encoded) as answer:
                async for event in answer.events:
                    await self._queue.put((index, answer.counted(event)))
            await self._queue.put((index, None))
        except Exception as error:
            await self._queue.put((index, error))

    async def next(self) -> tuple[int, Sequence[AnswerEvent]] | None:
        """Wait for the next events of any answer, and return them with its number; None when all
        have ended. An error in one of them is raised."""
        while self._running:
            index, news = await self._queue.get()
            if isinstance(news, Exception):
                raise news
            if news is not None:
                return index, news
            self._running -= 1
        return None


@contextlib.asynccontextmanager
async def _side_by_side(
    asks: Sequence[AnswerRequest], encoded: Sequence[Encoded], answerer: Counted
) -> AsyncIterator[_SideBySide]:
    """Have several answers written while the body reads their events. They end with the body."""
    answers = _SideBySide(len(asks))
    tasks = [
        asyncio.create_task(answers.feed(index, ask, encoded[index], answerer))
        for index, ask in enumerate(asks)
    ]
    try:
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shaped(
    index: int, event: AnswerEvent, show: Show | None, shape: Shape | ResponseShape
) -> list[Any]:
    """Returns what the client is sent for one event of a choice (answer); `show` is the change of
    its text, None if there is none."""
    chunks: list[Any] = []
    is_end = isinstance(event, Ended)
    if isinstance(event, Began):
        chunks += shape.begin(index, event)
    if isinstance(event, LinkNews | Note | Reading) and shape.marked:
        chunks.append(shape.news(event))
    elif isinstance(event, Reading):
        chunks.append(Comment(_comment_on(event)))
    if show is not None or is_end:
        is_devices_own = isinstance(event, Piece) and not event.verified
        chunks += shape.piece(index, show, alone=is_devices_own, last=is_end)
    if isinstance(event, Ended):
        chunks += shape.end(index, event)
    return chunks


def _comment_on(reading: Reading) -> str:
    """Returns how far the prompt is read, in words. Of nothing read nobody knows whether it is being
    read: many engines do not tell."""
    if not reading.done:
        return f"waiting for an answer to a prompt of {reading.total} tokens"
    return f"reading the prompt: {reading.done} of {reading.total} tokens"
