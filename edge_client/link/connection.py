"""The websocket to a verifier at the byte level: it reads no more than the other end does.

The library answers each ping at once, however many answers wait already. And it waits for its own
ping to be written before it begins to count the time for the answer. So a verifier that sends pings
and reads nothing would fill this device's memory, and never be noticed.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from websockets.asyncio.client import ClientConnection


class Connection(ClientConnection):
    """Is not read while answers wait that the other end does not read, and dropped if that lasts as
    long as the answer to a ping may take."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._unread_deadline: asyncio.TimerHandle | None = None
        """Ends the connection if the other end does not read until then."""
        self.heard_at = perf_counter()
        """When the other end sent something for the last time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read: the connection is established."""
        super().connection_made(transport)
        self.recv_messages.resume = self._go_on_reading

    def data_received(self, data: bytes) -> None:
        """Take what the other end has sent, and note when."""
        self.heard_at = perf_counter()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: the connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Read nothing more, and give the other end, which does not read, so much time to do so."""
        super().pause_writing()
        self.transport.pause_reading()
        if self.ping_timeout is not None:
            self._unread_deadline = self.loop.call_later(self.ping_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the other end reads again."""
        super().resume_writing()
        self._stop_waiting()
        if not self.recv_messages.paused:
            self.transport.resume_reading()

    def _go_on_reading(self) -> None:
        """Read again, as there is room for messages, unless answers wait."""
        if not self.paused:
            self.transport.resume_reading()

    def _stop_waiting(self) -> None:
        """Forget the deadline."""
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None
