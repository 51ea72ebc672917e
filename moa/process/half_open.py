"""Connections that have not finished their handshake: counted and bounded. Also the limit of open
files.

Anybody can open a TCP connection and send nothing. Each uses a file descriptor until the handshake
times out, and without descriptors nobody can connect. So the number of half-open connections is
limited; for a new one, the oldest of the address with the most of them is dropped. A normal
handshake takes a round trip or two and is rarely the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

_SPARE_DESCRIPTORS = 32
"""File descriptors for the log, the model's files, DNS, and connections that are being refused."""


class HalfOpenConnection(Protocol):
    """A connection whose handshake is not finished."""

    @property
    def peer(self) -> str:
        """Address and port."""

    def abort(self) -> None:
        """End it at once."""


class HalfOpen:
    """The half-open connections of one port."""

    def __init__(
        self, most: int, dropped: Callable[[str, int], None] = lambda peer, count: None
    ) -> None:
        """Let `most` connections be in their handshake at once. `dropped` is called with the peer
        of a connection that was dropped for a new one, and how many its address had."""
        self.most = most
        self._dropped = dropped
        self._waiting: dict[HalfOpenConnection, str] = {}
        """The address of each, the oldest first."""
        self._hosts: Counter[str] = Counter()
        """How many each address has."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, connection: object) -> bool:
        return connection in self._waiting

    def enter(self, connection: HalfOpenConnection) -> None:
        """Count a connection that begins its handshake, or goes on with it after that of TLS."""
        if connection in self._waiting:
            return
        host = connection.peer.rpartition(":")[0]
        self._waiting[connection] = host
        self._hosts[host] += 1
        if len(self._waiting) > self.most:
            self.make_room()

    def leave(self, connection: HalfOpenConnection) -> None:
        """Forget a connection that has finished its handshake, or is gone."""
        host = self._waiting.pop(connection, None)
        if host is None:
            return
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    def close(self) -> None:
        """Abort all half-open connections."""
        for connection in list(self._waiting):
            self.leave(connection)
            connection.abort()

    def make_room(self) -> None:
        """Drop the oldest connection of the most crowded address, if there is one."""
        if not self._waiting:
            return
        crowded, count = self._hosts.most_common(1)[0]
        oldest = next(connection for connection, host in self._waiting.items() if host == crowded)
        self._dropped(oldest.peer, count)
        self.leave(oldest)
        oldest.abort()


def room_for_connections(wanted: int, half_open: int, *, ports: int = 1) -> tuple[int, int]:
    """How many connections, and half-open ones (in their handshake), a port may have: as many as
    are wanted, or fewer where the process's limit of open files, shared among so many ports, has no
    room for them. A quarter of the room at most is for half-open ones."""
    free = _free_descriptors()
    if free is None:
        return wanted, half_open
    share = free // ports
    if wanted + half_open <= share:
        return wanted, half_open
    fitting_half_open = max(1, min(half_open, share // 4))
    fitting = max(1, min(wanted, share - fitting_half_open))
    return fitting, fitting_half_open


def _free_descriptors() -> int | None:
    """How many more files this process may open, those that it needs for other things left out;
    None if that is not limited, or unknown."""
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
        used = 3  # input, output and errors
    return max(2, soft - used - _SPARE_DESCRIPTORS)
