"""Connections that have not finished their handshake: counted, bounded and logged. Also the limit of open files.

Anybody can open a TCP connection and send nothing. Each uses a file descriptor until the handshake times out, and
without descriptors nobody can connect. So the number of half-open connections is limited; for a new one, the oldest of
the address with the most of them is dropped. A normal handshake takes a round trip or two and is rarely the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from cloud_verifier.logs import log

_SPARE_DESCRIPTORS = 32
"""File descriptors for the log, the model's files, DNS, and connections that are being refused."""


class Half(Protocol):
    """A half-open connection."""

    @property
    def peer(self) -> str:
        """Address and port."""

    def abort(self) -> None:
        """End it at once."""


class HalfOpen:
    """The half-open connections of a process."""

    def __init__(self, most: int, dropped: Callable[[], None] = lambda: None) -> None:
        self.most, self._dropped = most, dropped
        self._waiting: dict[Half, str] = {}
        self._hosts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: Half) -> None:
        """A connection begins its handshake, or goes on with it behind TLS's."""
        if connection in self._waiting:
            return
        host = connection.peer.rpartition(":")[0]
        self._waiting[connection] = host
        self._hosts[host] += 1
        if len(self._waiting) > self.most:
            self._make_room()

    def leave(self, connection: Half) -> None:
        """It has finished its handshake, or is gone."""
        host = self._waiting.pop(connection, None)
        if host is not None:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    def close(self) -> None:
        """Abort all of them."""
        for connection in list(self._waiting):
            self.leave(connection)
            connection.abort()

    def _make_room(self) -> None:
        (crowded, count), *_ = self._hosts.most_common(1)
        oldest = next(connection for connection, host in self._waiting.items() if host == crowded)
        log.warning(
            "too many half-open connections: the oldest of this address is dropped, it has %d",
            count,
            extra={"peer": oldest.peer, "event": "half_open", "limit": "max_half_open"},
        )
        self._dropped()
        self.leave(oldest)
        oldest.abort()


def room_for_connections(wanted: int, half_open: int) -> tuple[int, int]:
    """How many connections, and half-open ones, fit the process's limit of open files."""
    free = _free_descriptors()
    if free is None or wanted + half_open <= free:
        return wanted, half_open
    half = max(1, min(half_open, free // 4))
    return max(1, min(wanted, free - half)), half


def _free_descriptors() -> int | None:
    """How many more files this process may open; None if unknown."""
    try:
        import os
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 3
    return max(2, soft - used - _SPARE_DESCRIPTORS)
