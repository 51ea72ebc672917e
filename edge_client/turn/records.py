"""The activation records of one conversation: store rows, and choose their precision.

The verifier chooses which rows to send, newest first; the connection controls the rate
(`RecordFlow`). Tokens are exact whatever happens to records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge_client.link.record_flow import RecordFlow
from moa import records
from moa.errors import ProtocolError
from moa.graph.cache import RecordBuffer
from moa.wire import ClientSession
from moa.wire.messages import Activations, RecordDtype, Sync

Precision = Literal["auto", "int8", "int4", "fp16", "off"]

_TOO_SLOW = 1.5
"""Ask for int4 where the bandwidth is below this multiple of what int8 records of new tokens need."""
_FAST_ENOUGH = 4.0
"""Ask for int8 again where it is above this multiple."""
_SAMPLES = 8
"""Bandwidth samples needed before the precision is changed, and before it is changed back."""
_MOST_EARLY = 64
"""Messages whose tokens may be unknown; more of them break the protocol."""


@dataclass
class Records:
    """One conversation's records."""

    buffer: RecordBuffer | None
    flow: RecordFlow = field(default_factory=RecordFlow)
    precision: Precision = "auto"
    rows: int = 0
    """Rows received."""
    arrived: list[Activations] = field(default_factory=list)
    """Records that are not stored yet: that is done while no request can be made."""
    _early: list[Activations] = field(default_factory=list)
    """Records of tokens that are not in the log yet."""
    _lowered: bool = False
    """Whether the precision is lowered, because the link is slow."""
    _judged_at: int = 0
    """Bandwidth samples there were when the precision was last changed."""

    @property
    def dtype(self) -> RecordDtype:
        """The precision to ask for now."""
        if self.buffer is None:
            return "off"
        if self.precision != "auto":
            return self.precision
        can_be_int4 = self.buffer.wire.width % 2 == 0  # two numbers a byte
        return "int4" if self._lowered and can_be_int4 else "int8"

    def held(self) -> list[tuple[int, int]]:
        """The rows received."""
        return list(self.buffer.held) if self.buffer is not None else []

    def misses(self, rows: int) -> bool:
        """Whether records of the first `rows` tokens are wanted, and not all of them are here."""
        return (
            self.buffer is not None
            and self.dtype != "off"
            and self.buffer.held.newest_missing(rows, 1) is not None
        )

    def store(self, session: ClientSession, longest: int) -> None:
        """Store the activation records that have arrived, each for one token of the log. Records
        may come before their tokens, whose answer was lost with a connection and is told again only
        when asked for: such records wait, unless they are beyond `longest`, the longest log that
        this turn can have.

        Records of another session than this one are dropped; a message that breaks a rule raises a
        `ProtocolError`.
        """
        for message in self.arrived:
            self.flow.taken(len(message.payload))  # the verifier may send as many bytes again
        waiting = self._early + self.arrived
        self.arrived = []
        self._early = []
        for message in waiting:
            if message.session != session.id:
                continue
            is_early = len(session.log) < message.start + message.rows <= longest
            if is_early and len(self._early) < _MOST_EARLY:
                self._early.append(message)
            else:
                self.keep(message, len(session.log))
                session.receive(message)

    def keep(self, message: Activations, length: int) -> None:
        """Put a message's records into the buffer that the drafter reads, each under its token's
        position. A `ProtocolError` if they are of tokens beyond the log's `length`, or not of the
        drafter's shape."""
        stop = message.start + message.rows
        if stop > length:
            raise ProtocolError(f"records of tokens {message.start}..{stop} of {length}")
        self.rows += message.rows
        if self.buffer is None or message.dtype == "off":
            return
        heads = self.buffer.wire
        if (message.heads, message.head_dim) != (heads.count, heads.width):
            raise ProtocolError(
                f"records of {message.heads} x {message.head_dim}, the drafter's are {heads.count} x {heads.width}"
            )
        keys, values = records.decode(
            message.payload, message.dtype, message.rows, heads.count, heads.width
        )
        self.buffer.put(message.start, keys, values)

    def truncate(self, length: int) -> None:
        """Drop the records of positions from `length` on: the tokens there have changed."""
        if self.buffer is not None:
            self.buffer.truncate(length)

    def adjust(self, session: ClientSession, tokens_per_second: float) -> Sync | None:
        """Ask for records in four bits instead of eight where the link is too slow for those, and
        in eight again where it is fast enough. Returns the message to send if the precision has
        changed."""
        samples = self.flow.bandwidth.samples
        if self.buffer is None or self.precision != "auto" or samples - self._judged_at < _SAMPLES:
            return None
        heads = self.buffer.wire
        needed = tokens_per_second * records.row_bytes("int8", heads.count, heads.width)
        available = self.flow.bandwidth.value  # bytes a second, as `needed`
        if session.record_rate:
            available = min(available, session.record_rate)
        # Two limits, so that a link between them does not go to and fro.
        limit = _FAST_ENOUGH if self._lowered else _TOO_SLOW
        lowered = available < limit * needed
        if lowered == self._lowered:
            return None
        self._lowered = lowered
        self._judged_at = samples
        session.records = self.dtype
        return Sync(session.id, self.dtype, session.record_rate)
