"""Resumable streams: sent frames are kept for a limited time and within a memory limit. No I/O; the caller passes the
time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moa.api.errors import ApiError

_FRAME_COST = 100
"""Memory overhead of a kept frame, in bytes."""


@dataclass(eq=False)
class Recording:
    """One stream's frames, numbered from 1 on."""

    id: str
    principal: str
    cancel: Callable[[], object] = lambda: None
    """Stops the work behind the stream."""
    frames: list[bytes] = field(default_factory=list)
    size: int = 0
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
    keep_seconds: float = 300.0
    """How long a complete stream is kept."""
    alone_seconds: float = 60.0
    """How long a running stream continues without a client."""
    most_bytes: int = 32 * 2**20
    _streams: dict[str, Recording] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Recording]:
        return iter(list(self._streams.values()))

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(stream.size for stream in self._streams.values())

    def open(self, id: str, principal: str) -> Recording:
        """A new stream."""
        self.sweep()
        stream = Recording(id, principal, touched=self.clock())
        self._streams[id] = stream
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
        """Remove expired streams, then the oldest ones while the memory limit is exceeded."""
        now = self.clock()
        for stream in self:
            if not stream.listeners:
                limit = self.keep_seconds if stream.closed else self.alone_seconds
                if now - stream.touched > limit:
                    self.drop(stream)
        size = self.size
        for stream in sorted(self, key=lambda s: (not s.closed, s.touched)):
            if size <= self.most_bytes:
                break
            size -= stream.size
            self.drop(stream)


def position(last_event_id: str, id: str) -> int:
    """Number of frames that a client already has, from its `Last-Event-ID`."""
    stream, _, number = last_event_id.strip().rpartition("/")
    if stream not in ("", id) or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise ApiError(400, f"Last-Event-ID is not of stream {id[:80]!r}", param="Last-Event-ID")
    return int(number)
