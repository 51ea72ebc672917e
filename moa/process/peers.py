"""Addresses of clients, in logs."""

from __future__ import annotations

_UNKNOWN_PORT = ":0"


def shown_peer(peer: str) -> str:
    """Returns a client's address and port as a reader gets them: without a port where none is known,
    because a proxy has told the address alone."""
    return peer.removesuffix(_UNKNOWN_PORT)
