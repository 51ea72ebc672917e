"""Resumable streams: their frames are kept as they were sent, for a limited time and within a
memory limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moa.api.errors import ApiError
from moa.api.fairness import charged
from moa.api.http import DONE, Comment, event_frame

_FRAME_COST = 100
"""Memory overhead of a kept frame, in bytes."""
_STREAM_COST = 4096
"""Bytes that a stream counts as without its frames; it also bounds their number."""
_SWEEP_SECONDS = 1.0
"""Seconds between two sweeps."""


@dataclass(eq=False)
class Recording:
    """One stream's frames, numbered from 1 on."""

    id: str
    principal: str
    clock: Callable[[], float]
    size: int = _STREAM_COST
    """Bytes that are kept because of it."""
    cancel: Callable[[], object] = lambda: None
    """Stops the work behind the stream: its answer, or the check of that."""
    frames: list[bytes] = field(default_factory=list)
    closed: bool = False
    touched: float = 0.0
    """When a client last read it, or when it ended."""
    listeners: int = 0
    """Clients that read it now."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is another frame, or no more; then there is a new one."""

    def add(self, event: Any) -> None:
        """Add an event as the next frame."""
        self.frames.append(event_frame(event, id=f"{self.id}/{len(self.frames) + 1}"))
        self.size += len(self.frames[-1]) + _FRAME_COST
        self._wake_readers()

    async def take(self, first: Any, events: AsyncGenerator[Any, None]) -> None:
        """Add all events of an answer as they come; the `first` one was taken from them already.
        Comments are not kept: they are about the moment."""
        async with contextlib.aclosing(events):
            if not isinstance(first, Comment):
                self.add(first)
            async for event in events:
                if not isinstance(event, Comment):
                    self.add(event)

    def reopen(self) -> None:
        """Let the stream go on. The mark of its end becomes a comment, so that whoever reads from
        the beginning does not take it for the end; the numbers of frames stay."""
        self.closed = False
        if self._is_ended:
            self.frames[-1] = Comment("continued").frame(among_numbers=True)

    @property
    def _is_ended(self) -> bool:
        """Whether the last frame is the mark of the end."""
        return bool(self.frames) and self.frames[-1].endswith(f"{DONE}\n\n".encode())

    def close(self) -> None:
        """End the stream."""
        if not self.closed:
            self.closed = True
            self.touched = self.clock()
            self._wake_readers()

    def _wake_readers(self) -> None:
        self.news.set()
        self.news = asyncio.Event()  # readers wait for the next frame on a new event

    async def listen(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the frames of the stream behind the first `after`, which the client has: those that
        are kept, then others as they come, until the stream is closed. A client that has all of a
        complete stream is sent its end once more: without it a stream counts as broken off, and is
        asked for again and again."""
        self.listeners += 1
        if self.closed and self._is_ended:
            after = min(after, len(self.frames) - 1)
        try:
            while True:
                news = self.news  # taken before looking, so that nothing is missed
                while after < len(self.frames):
                    after += 1
                    yield self.frames[after - 1]
                if self.closed:
                    return
                await news.wait()
        finally:
            self.listeners -= 1
            self.touched = self.clock()


@dataclass(eq=False)
class Recordings:
    """All resumable streams."""

    clock: Callable[[], float]
    keep_seconds: float
    """How long a complete stream is kept."""
    alone_seconds: float
    """How long a running stream continues without a client."""
    most_bytes: int
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The work behind running streams."""
    _streams: dict[str, Recording] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Recording]:
        return iter(list(self._streams.values()))

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(stream.size for stream in self._streams.values())

    def open(self, id: str, principal: str) -> Recording:
        """A new stream."""
        stream = Recording(id, principal, self.clock, touched=self.clock())
        self._streams[id] = stream
        self.sweep()
        return stream

    def record(self, stream: Recording, first: Any, events: AsyncGenerator[Any, None]) -> None:
        """Run the work behind these events independently of the client's connection. The first one
        was taken already."""
        task = asyncio.create_task(charged(stream.take(first, events)))
        self.tasks.add(task)
        stream.cancel = task.cancel
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: stream.close())

    def get(self, id: str, principal: str) -> Recording:
        """The recorded stream of this id; an `ApiError` if there is none, or if it is another
        principal's, to whom it looks as if it did not exist."""
        self.sweep()
        stream = self._streams.get(id)
        if stream is None or stream.principal != principal:
            raise ApiError(
                404,
                f"no stream {id[:80]!r}: it is no longer kept, or was not asked for as resumable",
                code="stream_not_found",
            )
        return stream

    def drop(self, stream: Recording) -> None:
        """Forget a stream and stop the work behind it."""
        if self._streams.pop(stream.id, None) is not None:
            stream.cancel()
            stream.close()  # wake the readers

    def sweep(self) -> None:
        """Remove the streams that nobody has read for too long; then, while all together take too
        many bytes, the oldest stream of the principal (the owner of a key) whose streams take the
        most: nobody pushes out another's."""
        now = self.clock()
        for stream in self:
            if stream.listeners:
                continue
            limit = self.keep_seconds if stream.closed else self.alone_seconds
            if now - stream.touched > limit:
                self.drop(stream)
        sizes = Counter[str]()
        for stream in self:
            sizes[stream.principal] += stream.size
        while sizes.total() > self.most_bytes:
            largest, _ = sizes.most_common(1)[0]
            theirs = [stream for stream in self if stream.principal == largest]
            # Complete ones go first.
            oldest = min(theirs, key=lambda stream: (not stream.closed, stream.touched))
            sizes[largest] -= oldest.size
            self.drop(oldest)

    async def keep_swept(self) -> None:
        """Remove what is over a limit, once a second."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()


def position(last_event_id: str, id: str) -> int:
    """Number of frames that a client already has, from its `Last-Event-ID`."""
    stream, _, number = last_event_id.strip().rpartition("/")
    is_number = number.isascii() and number.isdigit() and len(number) <= 9
    if stream not in ("", id) or not is_number:
        raise ApiError(400, f"Last-Event-ID is not of stream {id[:80]!r}", param="Last-Event-ID")
    return int(number)
