"""Ports for servers that start later, or again and again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port that refuses connections until someone listens on it. It stays bound, or another program could be given
    it meanwhile; a server that reuses addresses, as all of ours do, may listen nevertheless."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
