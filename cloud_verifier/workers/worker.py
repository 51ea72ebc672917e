"""A worker as the front sees it: its process, its control line, its connections and its health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from cloud_verifier.workers.control import (
    Control,
    Heartbeat,
    Line,
    MetricsRequest,
    SendMetrics,
    Serve,
    StartFailed,
    WorkerMetrics,
    pair,
)
from moa.errors import MoaError

_PAGE_SECONDS = 4.0

Start = Callable[[int, socket.socket], BaseProcess]
"""Starts the process of a worker by its index, with its end of the line."""


class Worker:
    """One worker; its process may die and be replaced."""

    def __init__(self, index: int, asked: Callable[[Worker], None], clock: Callable[[], float]) -> None:
        self.index, self._asked, self._clock = index, asked, clock
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.failure: MoaError | None = None
        self._process: BaseProcess | None = None
        self._line: Line | None = None
        self._beat = Heartbeat(0, 0, "starting")
        self._healthy_at = 0.0
        self._given = 0
        self._waiting: deque[asyncio.Future[bytes]] = deque()

    @property
    def well(self) -> bool:
        """Whether it takes connections."""
        return self.ready.is_set() and not self._beat.wrong

    @property
    def load(self) -> int:
        """Its connections, including those being passed to it."""
        return self._beat.open + self._given - self._beat.taken

    @property
    def unhealthy_seconds(self) -> float:
        """Seconds for which it has been unhealthy."""
        return self._clock() - self._healthy_at if self.ready.is_set() else 0.0

    async def live(self, start: Start) -> None:
        """Run a process from its start to its end."""
        ours, theirs = pair()
        self._beat, self._given = Heartbeat(0, 0, "starting"), 0
        self.ended.clear()
        with theirs:  # the process has a copy: when that is closed, the process has ended
            self._process = start(self.index, theirs)
        self._line = Line(ours, self._heard, lost=self.ended.set)
        try:
            await self.ended.wait()
        finally:
            self.ready.clear()
            self._line.close()
            self._line = None
            self.kill()
            while self._waiting:
                self._tell(b"")
            await asyncio.to_thread(self._process.join)

    def take(self, message: Serve, sock: socket.socket) -> bool:
        """Pass a connection on; False if that is not possible."""
        taken = self._line is not None and self._line.send(message, sock)
        self._given += taken
        return taken

    def send(self, message: Control) -> None:
        """Send it a message."""
        if self._line is not None:
            self._line.send(message)

    async def page(self) -> bytes:
        """Its metrics, compressed; empty if it does not answer."""
        reader: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(reader)
        self.send(SendMetrics())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAGE_SECONDS):
                return await asyncio.shield(reader)
        return b""

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()

    def _heard(self, message: Control, carried: socket.socket | None) -> None:
        match message:
            case Heartbeat():
                self._beat = message
                if not message.wrong or not self.ready.is_set() or message.wrong == "draining":
                    self._healthy_at = self._clock()
                self.ready.set()
            case WorkerMetrics():
                self._tell(message.page)
            case MetricsRequest():
                self._asked(self)
            case StartFailed():
                self.failure = MoaError(message.line)
                self.failure.exit_code = message.code

    def _tell(self, page: bytes) -> None:
        """Answer the oldest request, whose client may have left."""
        if self._waiting and not (reader := self._waiting.popleft()).done():
            reader.set_result(page)
