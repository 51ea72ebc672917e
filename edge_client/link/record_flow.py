"""Flow control of activation records, over all sessions of a connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_client.link.estimates import Smoothed
from moa.wire.messages import Ack

_CLOSE = 0.5
"""Seconds between two runs of records below which the second was sent at the speed of the link."""


@dataclass
class RecordFlow:
    """The verifier paces records by the acknowledgements."""

    bandwidth: Smoothed = field(default_factory=Smoothed)
    """Bytes a second at which runs of records arrive, where two follow each other closely."""
    _received: int = 0
    _acknowledged: int = 0
    _last: float = 0.0

    def connected(self) -> None:
        """Counting starts again on every connection."""
        self._received = self._acknowledged = 0

    def arrived(self, size: int, now: float) -> None:
        """A run of records arrived: update the rate."""
        if self._last and size and 0 < now - self._last < _CLOSE:
            self.bandwidth.add(size / (now - self._last))
        self._last = now

    def taken(self, size: int) -> None:
        """A run of records is stored or dropped: the verifier may send more."""
        self._received += size

    def acknowledge(self) -> Ack | None:
        """The acknowledgement to send, if there is anything new."""
        if self._received == self._acknowledged:
            return None
        self._acknowledged = self._received
        return Ack(self._received)
