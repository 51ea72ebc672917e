"""Connections of the websocket port that never became one: counted by kind, and logged now and then.
An operator whose devices do not connect finds here why."""

from __future__ import annotations

from websockets.exceptions import InvalidMessage, InvalidOrigin, InvalidUpgrade

from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.process.rare_lines import RareLines
from moa.process.secured import TlsFailure

_WORDS = {
    "no_tls": "plain bytes on a port with TLS: its address is wss://",
    "tls": "a TLS handshake failed",
    "tls_here": "TLS on a port without it: its address is ws://",
    "no_request": "what came is no HTTP request",
    "no_websocket": "an HTTP request that opens no websocket: OpenAI's API is the port of --openai",
    "origin": "the page of another website was refused: --origin lets one in",
    "handshake": "a websocket's handshake failed",
}
"""What is logged of each kind."""
_OTHER_METHODS = (b"POST", b"HEAD", b"PUT", b"OPTIONS", b"PATCH", b"DELETE")
"""Of HTTP, than the one that opens a websocket."""
_CLIENT_HELLO = b"\x16\x03"
"""How TLS begins: a record of a handshake, of any version."""


class Unusable:
    """Those of one port."""

    def __init__(self, metrics: Metrics) -> None:
        self._count = metrics.failed_connections
        self._lines = RareLines(log)

    def unsecured(self, peer: str, failure: TlsFailure) -> None:
        """Note that the TLS handshake of a connection has failed."""
        self._note(failure.kind, peer, failure.reason)

    def note(self, peer: str, first: bytes, error: Exception | None) -> None:
        """Note that a connection, whose first bytes are given, opened no websocket: for this
        reason, or, without one, because its request never was whole. One that has sent nothing is
        a probe of a load balancer."""
        if not first:
            return
        if first.startswith(_CLIENT_HELLO):
            self._note("tls_here", peer)
        elif first.partition(b" ")[0] in _OTHER_METHODS:
            self._note("no_websocket", peer)
        elif error is None or isinstance(error, InvalidMessage):
            self._note("no_request", peer)
        elif isinstance(error, InvalidUpgrade):
            self._note("no_websocket", peer)
        elif isinstance(error, InvalidOrigin):
            self._note("origin", peer, str(error.value or "")[:200])
        else:
            self._note("handshake", peer, str(error)[:200])

    def _note(self, kind: str, peer: str, why: str = "") -> None:
        self._count.labels(kind).inc()
        words = f"{_WORDS[kind]} ({why})" if why else _WORDS[kind]
        self._lines.warn(kind, words, peer, "failed_connection", kind=kind)
