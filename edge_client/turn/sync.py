"""The stream of activation records, seen from the device: put rows where they belong, acknowledge, choose precision.

Which rows are sent, newest first, is the verifier's part. Here is decided how precise they are and how fast they may
come; tokens are exact whatever happens to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge_client.drafter.cache import RecordBuffer
from edge_client.turn.budget import Budget
from edge_client.turn.estimates import Smoothed
from moa import records
from moa.errors import ProtocolError
from moa.wire import ClientSession
from moa.wire.messages import Ack, Activations, RecordDtype, Sync

Precision = Literal["auto", "int8", "int4", "fp16", "off"]

_HEADROOM = 1.5
"""A precision is fine while the link carries so many times what new tokens need; else a smaller one is asked for."""


@dataclass
class RecordSync:
    """One session's records."""

    buffer: RecordBuffer | None
    precision: Precision = "auto"
    budget: Budget = field(default_factory=Budget)
    rows: int = 0
    """Rows received."""
    payload_bytes: int = 0
    bandwidth: Smoothed = field(default_factory=Smoothed)
    """Bytes a second at which runs of records arrive, where two follow each other closely."""
    _received: int = 0
    _acknowledged: int = 0
    _last_arrival: float = 0.0
    _lowered: bool = False

    @property
    def dtype(self) -> RecordDtype:
        """What to ask for now."""
        if self.buffer is None:
            return "off"
        if self.precision == "auto":
            return "int4" if self._lowered and self.buffer.wire.width % 2 == 0 else "int8"
        return self.precision

    def misses(self, rows: int) -> bool:
        """Whether records of the first `rows` tokens are wanted, and not all of them are here."""
        return self.buffer is not None and self.dtype != "off" and self.buffer.held.newest_missing(rows, 1) is not None

    def connected(self) -> None:
        """Flow control counts anew on every connection."""
        self._received = self._acknowledged = 0

    def arrived(self, message: Activations, now: float) -> None:
        """Count what came over this connection: all of it is to be acknowledged."""
        size = len(message.payload)
        self.payload_bytes += size
        self._received += size
        if self._last_arrival and size and 0 < now - self._last_arrival < 0.5:
            self.bandwidth.add(size / (now - self._last_arrival))
        self._last_arrival = now

    def keep(self, message: Activations) -> None:
        """Put the rows into the buffer."""
        self.rows += message.rows
        if self.buffer is not None and message.dtype != "off":
            heads = self.buffer.wire
            if (message.heads, message.head_dim) != (heads.count, heads.width):
                raise ProtocolError(
                    f"records of {message.heads} x {message.head_dim}, the drafter's are {heads.count} x {heads.width}"
                )
            self.buffer.put(
                message.start, *records.decode(message.payload, message.dtype, message.rows, heads.count, heads.width)
            )

    def acknowledge(self) -> Ack | None:
        """What to tell the verifier, soon: it paces the records by how fast acknowledgements come back."""
        if self._received == self._acknowledged:
            return None
        self._acknowledged = self._received
        return Ack(self._received)

    def adjust(self, session: ClientSession, tokens_per_second: float) -> Sync | None:
        """Ask for smaller records where the link cannot carry these; perhaps a message to send."""
        if self.buffer is None or self.precision != "auto" or self._lowered or self.bandwidth.samples < 8:
            return None
        heads = self.buffer.wire
        needed = tokens_per_second * records.row_bytes("int8", heads.count, heads.width)
        room = self.bandwidth.value
        if self.budget.record_rate:
            room = min(room, float(self.budget.record_rate))
        if room >= _HEADROOM * needed:
            return None
        self._lowered = True
        session.records = self.dtype
        return Sync(session.id, self.dtype, session.record_rate)
