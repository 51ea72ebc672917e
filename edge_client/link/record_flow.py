"""Flow control of activation records, over all sessions of a connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_client.link.estimates import Smoothed
from moa.wire.messages import Ack

_CLOSE = 0.5
"""Seconds between two runs of records below which the second was sent at the speed of the link."""


@dataclass
class RecordFlow:
    """What has been received of activation records, and acknowledged: the verifier sends more only
    as they are acknowledged."""

    bandwidth: Smoothed = field(default_factory=Smoothed)
    """Bytes a second at which runs of records arrive, where two follow each other closely."""
    _received: int = 0
    """Bytes of records that this connection has brought, and that are stored or dropped."""
    _acknowledged: int = 0
    """Bytes of them that the verifier has been told."""
    _last: float | None = None
    """When the latest run of records arrived."""

    def connected(self) -> None:
        """Begin to count again: each connection has counts of its own."""
        self._received = 0
        self._acknowledged = 0

    def arrived(self, size: int, now: float) -> None:
        """Note that a run of records of `size` bytes arrived, and estimate the link's bandwidth by it
        if it came close behind another one."""
        if self._last is not None and size > 0:
            seconds = now - self._last
            if 0 < seconds < _CLOSE:
                self.bandwidth.add(size / seconds)
        self._last = now

    def taken(self, size: int) -> None:
        """Note that a run of records is stored or dropped: the verifier may send more."""
        self._received += size

    def acknowledge(self) -> Ack | None:
        """Return the acknowledgement to send; None if nothing has been taken since the last one."""
        if self._received == self._acknowledged:
            return None
        self._acknowledged = self._received
        return Ack(self._received)
