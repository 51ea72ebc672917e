"""Resumable streams: sent frames are kept for a limited time and within a memory limit, and answers that the device has
finished alone are corrected. No I/O; the caller passes the time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from moa.api.answer import AnswerRequest, AnswerSource, Ended
from moa.api.errors import ApiError
from moa.api.present import Show
from moa.api.responses import ResponseShape
from moa.api.shapes import Shape
from moa.api.stream import side_by_side
from moa.text_stream import common_prefix

_MOST_FAILURES = 3
_FRAME_COST = 100
"""Memory overhead of a kept frame, in bytes."""
_STREAM_COST = 4096
"""Of a stream; it also bounds their number."""


@dataclass
class Recheck:
    """One kept answer of mode `provisional`: when the verifier is back it is checked, and corrected.

    The target's text is a function of prompt, settings and seed. So the answer is asked for once more, with what was
    written as the prediction, and the kept stream gets the difference.
    """

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


@dataclass(eq=False)
class Recording:
    """One stream's frames, numbered from 1 on."""

    id: str
    principal: str
    size: int = 0
    """Bytes that it holds, those of `response` included."""
    response: ResponseShape | None = None
    """The stored response whose stream it is."""
    recheck: Recheck | None = None
    """Corrects the stream when the verifier is back."""
    cancel: Callable[[], object] = lambda: None
    """Stops the work behind the stream."""
    frames: list[bytes] = field(default_factory=list)
    closed: bool = False
    touched: float = 0.0
    """When a client last read it, or when it ended."""
    listeners: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, frame: bytes) -> None:
        """Another frame."""
        self.frames.append(frame)
        self.size += len(frame) + _FRAME_COST
        self._tell()

    def reopen(self) -> None:
        """More follows: whoever reads from the beginning must not take the end so far for the end."""
        self.closed = False
        if self.frames[-1].endswith(b"[DONE]\n\n"):
            self.frames[-1] = b": continued\n\n"  # a comment in its place

    def close(self, now: float) -> None:
        """The stream is over."""
        if self.closed:
            return
        self.closed, self.touched = True, now
        self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()  # readers wait for the next frame on a new event


@dataclass(eq=False)
class Recordings:
    """All resumable streams."""

    clock: Callable[[], float]
    keep_seconds: float
    """How long a complete stream is kept."""
    alone_seconds: float
    """How long a running stream continues without a client."""
    most_bytes: int
    _streams: dict[str, Recording] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Recording]:
        return iter(list(self._streams.values()))

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(stream.size for stream in self._streams.values())

    def open(
        self, id: str, principal: str, response: ResponseShape | None = None, recheck: Recheck | None = None
    ) -> Recording:
        """A new stream; what is given is kept with it."""
        size = _STREAM_COST + sum(part.size for part in (response, recheck) if part is not None)
        if size > self.most_bytes // 4:
            raise ApiError(413, f"{size} bytes are too many to keep: send store: false", code="too_long_to_store")
        stream = Recording(id, principal, size, response, recheck, touched=self.clock())
        self._streams[id] = stream
        self.sweep()
        return stream

    def get(self, id: str, principal: str) -> Recording:
        """A stream by its id. To another principal it looks as if it did not exist."""
        self.sweep()
        stream = self._streams.get(id)
        if stream is None or stream.principal != principal:
            raise ApiError(404, f"no stream {id[:80]!r}: it never was, or is no longer kept", code="stream_not_found")
        return stream

    def drop(self, stream: Recording) -> None:
        """Forget a stream and stop the work behind it."""
        if self._streams.pop(stream.id, None) is not None and not stream.closed:
            stream.cancel()
            stream.close(self.clock())  # wake the readers

    def sweep(self) -> None:
        """Remove expired streams; then, while there are too many bytes, the oldest of the principal with the most:
        nobody pushes out another's."""
        now = self.clock()
        for stream in self:
            if not stream.listeners:
                limit = self.keep_seconds if stream.closed else self.alone_seconds
                if now - stream.touched > limit:
                    self.drop(stream)
        sizes = Counter[str]()
        for stream in self:
            sizes[stream.principal] += stream.size
        while sizes.total() > self.most_bytes:
            largest, _ = sizes.most_common(1)[0]
            oldest = min(
                (stream for stream in self if stream.principal == largest), key=lambda s: (not s.closed, s.touched)
            )
            sizes[largest] -= oldest.size
            self.drop(oldest)


def position(last_event_id: str, id: str) -> int:
    """Number of frames that a client already has, from its `Last-Event-ID`."""
    stream, _, number = last_event_id.strip().rpartition("/")
    if stream not in ("", id) or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise ApiError(400, f"Last-Event-ID is not of stream {id[:80]!r}", param="Last-Event-ID")
    return int(number)
