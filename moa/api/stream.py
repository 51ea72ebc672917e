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
    questions = {id(ask.question): ask for ask in asks}  # choices share theirs
    encoded = {key: await answerer.encode(ask) for key, ask in questions.items()}
    if len(asks) == 1:
        async with contextlib.aclosing(
            _answer(answerer, asks[0], encoded[id(asks[0].question)])
        ) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]] = asyncio.Queue(_WAITING)

    async def feed(index: int, ask: AnswerRequest) -> None:
        try:
            async with contextlib.aclosing(
                _answer(answerer, ask, encoded[id(ask.question)])
            ) as events:
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
    async with contextlib.aclosing(answerer.answer(ask, encoded)) as events:
        async for event in events:
            if isinstance(event, Ended) and left_out:
                more = {**event.counts.more, "left_out_messages": left_out}
                yield replace(event, counts=replace(event.counts, more=more))
                continue
            yield event
            if isinstance(event, Began) and left_out:
                yield Note(left_out_notice(left_out))


async def streamed(
    asks: Sequence[AnswerRequest], shape: Shape | ResponseShape, answerer: Counted
) -> AsyncGenerator[Any, None]:
    """The events of a stream. An error after the first becomes one, and the last."""
    presenters = [Presenter(ask.mode) for ask in asks]
    begun = False
    try:
        async with contextlib.aclosing(side_by_side(answerer, asks)) as events:
            async for index, event in events:
                begun = begun or isinstance(event, Began)
                show = presenters[index].take(event)
                for told in _shaped(index, event, show, shape):
                    yield told
                if show is not None and show.logprobs:
                    await asyncio.sleep(0)  # those of thousands of tokens take a second to write
    except MoaError as error:
        if not begun:
            raise
        yield shape.fail(from_error(error))


def _shaped(
    index: int, event: AnswerEvent, show: Show | None, shape: Shape | ResponseShape
) -> Iterator[Any]:
    """What the client is sent for an event of a choice; `show` is the change of its text."""
    ended = isinstance(event, Ended)
    if isinstance(event, Began):
        yield from shape.begin(index, event)
    if isinstance(event, LinkNews | Note | Reading) and shape.marked:
        yield shape.news(event)
    elif isinstance(event, Reading):
        yield Comment(f"reading the prompt: {event.done} of {event.total} tokens")
    if show is not None or ended:
        alone = isinstance(event, Piece) and not event.verified
        yield from shape.piece(index, show, alone=alone, last=ended)
    if isinstance(event, Ended):
        yield from shape.end(index, event)
