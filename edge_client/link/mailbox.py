"""What has arrived for one conversation and is not read yet, with a limit."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from moa.errors import ProtocolError
from moa.wire.messages import ServerMessage

_MAX_WAITING = 16_384
_MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Most bytes that may wait for a conversation with a slow reader; a normal verifier does not send
more."""


@dataclass(eq=False)
class Mailbox:
    """The messages that have arrived for one conversation, with their times."""

    messages: deque[tuple[float, ServerMessage]] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a message arrived or the state of the link changed."""
    sessions: set[bytes] = field(default_factory=set)
    waiting_bytes: int = 0

    def put(self, arrived: float, message: ServerMessage, size: int) -> None:
        """Add a message of `size` bytes that arrived at this time. A `ProtocolError` if far more
        waits than a verifier is asked for."""
        self.waiting_bytes += size
        if len(self.messages) >= _MAX_WAITING or self.waiting_bytes > _MAX_WAITING_BYTES:
            raise ProtocolError(
                f"the verifier sent {self.waiting_bytes} bytes that were not requested"
            )
        self.messages.append((arrived, message))
        self.news.set()

    def take(self) -> list[tuple[float, ServerMessage]]:
        """Take out all messages that have arrived since the last call, each with its time."""
        taken = list(self.messages)
        self.messages.clear()
        self.waiting_bytes = 0
        return taken

    async def wait(self, seconds: float | None) -> None:
        """Wait for a message, or for a change of the link's state, at most for so many seconds
        (None: for as long as it takes)."""
        if self.messages:
            return
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self.news.set)
        try:
            await self.news.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self.news.clear()
