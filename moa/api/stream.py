"""Answers for one client: several choices in parallel, whole or as a stream of chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

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
from moa.api.errors import from_error
from moa.api.http import Comment
from moa.api.load import Counted
from moa.api.present import Presenter, Show
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.chat_window import left_out_notice
from moa.errors import MoaError

_WAITING = 64
"""Events of a request with several choices that may wait for a slow client; then the choices pause."""


async def side_by_side(
    answerer: Counted, asks: Sequence[AnswerRequest]
) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
    """Events of all answers as they come, each with the number of its answer. Closing the generator
    ends them all."""
    encoded: dict[int, Encoded] = {}  # by the question's identity: choices share theirs
    for ask in asks:
        if id(ask.question) not in encoded:
            encoded[id(ask.question)] = await answerer.encode(ask)
    if len(asks) == 1:
        events = _answer(answerer, asks[0], encoded[id(asks[0].question)])
        async with contextlib.aclosing(events):
            async for event in events:
                yield 0, event
        return
    # An exception or None is the last of an answer.
    queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]] = asyncio.Queue(_WAITING)

    async def feed(index: int, ask: AnswerRequest) -> None:
        events = _answer(answerer, ask, encoded[id(ask.question)])
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    await queue.put((index, event))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(feed(index, ask)) for index, ask in enumerate(asks)]
    try:
        running = len(tasks)
        while running:
            index, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield index, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    answerer: Counted, ask: AnswerRequest, encoded: Encoded
) -> AsyncGenerator[AnswerEvent, None]:
    """The answerer's events, and the news that messages were left out of the prompt."""
    left_out = encoded.left_out
    events = answerer.answer(ask, encoded)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Ended) and left_out:
                more = {**event.counts.more, "left_out_messages": left_out}
                event = replace(event, counts=replace(event.counts, more=more))
            yield event
            if isinstance(event, Began) and left_out:
                yield Note(left_out_notice(left_out))


async def streamed(
    asks: Sequence[AnswerRequest], shape: Shape | ResponseShape, answerer: Counted
) -> AsyncGenerator[Any, None]:
    """The events of a stream. An error after the first becomes one, and the last."""
    presenters = [Presenter(ask.mode) for ask in asks]
    has_begun = False
    answers = side_by_side(answerer, asks)
    try:
        async with contextlib.aclosing(answers):
            async for index, event in answers:
                has_begun = has_begun or isinstance(event, Began)
                show = presenters[index].take(event)
                for sent in _shaped(index, event, show, shape):
                    yield sent
                if show is not None and show.logprobs:
                    await asyncio.sleep(0)  # those of thousands of tokens take a second to write
    except MoaError as error:
        if not has_begun:
            raise  # becomes the status of the response
        yield shape.fail(from_error(error))


def _shaped(
    index: int, event: AnswerEvent, show: Show | None, shape: Shape | ResponseShape
) -> Iterator[Any]:
    """What the client is sent for an event of a choice; `show` is the change of its text."""
    is_end = isinstance(event, Ended)
    if isinstance(event, Began):
        yield from shape.begin(index, event)
    if isinstance(event, LinkNews | Note | Reading) and shape.marked:
        yield shape.news(event)
    elif isinstance(event, Reading):
        yield Comment(f"reading the prompt: {event.done} of {event.total} tokens")
    if show is not None or is_end:
        is_devices_own = isinstance(event, Piece) and not event.verified
        yield from shape.piece(index, show, alone=is_devices_own, last=is_end)
    if isinstance(event, Ended):
        yield from shape.end(index, event)
