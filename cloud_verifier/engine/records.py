"""Activation records: made in the engine's thread, after the verdicts, newest tokens first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from statistics import median

import torch

from cloud_verifier.engine.contract import Post, Recorded, Report
from cloud_verifier.engine.job import Lease, finite
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.drafters.contract import Drafter
from moa.target.torch_target import Committed
from moa.wire.ranges import Ranges

_LEASES_AT_ONCE = 64
_LINGER = 0.02  # seconds that records may wait for an idle moment
_SHARE = 1 / 32
"""Share of the time that records may take while rounds leave no idle moment. A record is a hint:
where the verifier is full, late ones lower the edge's acceptance by 5 %; made at once they cost all
readers a quarter of the verifier."""
_FEW = 8
"""So many rows are made while nobody knows what one takes; and at least, when they are overdue."""
_LATEST = 5
"""The latest batches by which the time of a row is known: their median, because other load makes
single ones slow."""
_UNASKED = 16
"""So many batches of a session's rows may wait while nobody has asked for them: the server's own
drafter may never."""
_UNCOPIED = 8
"""So many forwards' states are held as they are, for all sessions that took part; then each copies
its own."""


class Recorder:
    """Makes the records of committed tokens, and stores them for the event loop."""

    def __init__(
        self,
        drafter: Drafter | None,
        post: Post,
        *,
        rows: int = 64,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most so many `rows` are made in one batch."""
        self._drafter = drafter
        self._post = post
        self._rows = rows
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._pending: dict[Lease, None] = {}
        self._waiting: dict[Lease, None] = {}
        """Leases whose records nobody has asked for yet."""
        self._since, self._took = 0.0, 0.0
        """When records were last made, and the seconds that it took."""
        self._row_seconds: deque[float] = deque(maxlen=_LATEST)
        """Seconds a row of the latest batches. In a smaller batch a row takes longer: the next is
        smaller still, until one fits."""
        self._untold: list[Report] = []

    @property
    def pending(self) -> bool:
        """Whether there are records to make or to report."""
        return bool(self._pending or self._untold) or any(
            lease.eager_records for lease in self._waiting
        )

    @property
    def overdue(self) -> bool:
        """Whether they have waited too long for an idle moment."""
        return self.pending and self._clock() - self._since > max(_LINGER, self._took / _SHARE)

    def add(self, lease: Lease, committed: Committed) -> None:
        """Remember tokens that were committed."""
        if self._drafter is None or lease.records is None:
            return
        backlog = lease.backlog
        if self._drafter.taps:
            at, states = lease.newest
            backlog.append(replace(committed, before=states if at == committed.start else None))
            lease.newest = committed.stop, committed.states[-1:].clone()
        else:
            backlog.append(replace(committed, tapped=None))
        lease.uncopied += 1
        if lease.uncopied == _UNCOPIED:
            backlog[-_UNCOPIED:] = [Committed.joined(backlog[-_UNCOPIED:])]
            lease.uncopied = 0
        if not lease.eager_records and committed.stop - backlog[0].start < _UNASKED * self._rows:
            self._waiting[lease] = None
            return
        self._waiting.pop(lease, None)
        if not self.pending:
            self._since = self._clock()
        self._pending.pop(lease, None)  # to the end: the latest session is served first
        self._pending[lease] = None

    def forget(self, lease: Lease) -> None:
        """The slot is about to be zeroed."""
        lease.backlog.clear()
        lease.uncopied = 0
        lease.newest = (0, None)
        self._pending.pop(lease, None)
        self._waiting.pop(lease, None)

    def drop(self) -> None:
        """Give up what is pending, because making it raises."""
        for lease in [*self._pending, *self._waiting]:
            self.forget(lease)
        self._untold = []

    def go(self, seconds: float) -> bool:
        """Make records for so many seconds, about: latest sessions first, newest rows first.
        Whether any fitted."""
        began = self._clock()
        rows = self._fitting(seconds)
        for lease in [lease for lease in self._waiting if lease.eager_records]:
            del self._waiting[lease]
            self._pending[lease] = None
        if rows:
            self._make(self._newest(list(islice(reversed(self._pending), _LEASES_AT_ONCE)), rows))
            self._since = self._clock()
            self._took = self._since - began
        self.report()
        return rows > 0

    def _fitting(self, seconds: float) -> int:
        """How many rows one batch may have to take no longer."""
        if seconds == math.inf:
            return self._rows
        each = median(self._row_seconds) if self._row_seconds else 0.0
        fit = seconds / each if each else _FEW  # a clock may be too coarse for a few rows
        return min(self._rows, max(int(fit), _FEW if self.overdue else 0))

    def report(self) -> None:
        """Report the records to the event loop; called after the verdicts, which go first."""
        if self._untold:
            self._post(self._untold)
            self._untold = []

    def finish(self, lease: Lease) -> bool:
        """Make one batch of this lease's missing records, to be reported later; returns whether all
        are made."""
        self._make(self._newest([lease], self._rows))
        return not lease.backlog

    def can_copy(self, source: Lease, lease: Lease, rows: int) -> bool:
        """Whether `lease` needs no records, or `source` has made or queued all of its first `rows`
        rows."""
        if lease.records is None:
            return True
        known = Ranges(source.made)
        for piece in source.backlog:
            known.add(piece.start, piece.stop)
        return source.records is not None and known.newest_missing(rows, 1) is None

    def copy(self, source: Lease, lease: Lease, rows: int) -> None:
        """Give `lease` the first rows of `source`: records that exist are copied, missing ones will
        be made for each."""
        if lease.records is None or source.records is None or (slot := lease.slot) is None:
            return
        if not self.pending:
            self._since = self._clock()
        for start, stop in source.made:
            if start < rows:
                lease.records.write(start, *source.records.read(start, min(stop, rows)))
                lease.made.add(start, min(stop, rows))
                self._untold.append(Recorded(lease, start, min(stop, rows)))
        shared = [piece for piece in source.backlog if piece.start < rows]
        lease.backlog = [replace(piece.part(0, rows - piece.start), slot=slot) for piece in shared]
        if lease.backlog:
            self._pending[lease] = None

    def _newest(self, leases: Iterable[Lease], room: int) -> list[tuple[Lease, Committed]]:
        """Take up to so many rows from the ends of these leases' backlogs."""
        pieces: list[tuple[Lease, Committed]] = []
        for lease in leases:
            while room > 0 and lease.backlog:
                newest = lease.backlog.pop()
                if (size := newest.stop - newest.start) > room:
                    lease.backlog.append(newest.part(0, size - room))
                    newest = newest.part(size - room, size)
                    size = room
                room -= size
                pieces.append((lease, newest))
            lease.uncopied = 0  # what comes next does not follow what is left
            if not lease.backlog:
                self._pending.pop(lease, None)
                self._waiting.pop(lease, None)
        return pieces

    @torch.inference_mode()
    def _make(self, pieces: list[tuple[Lease, Committed]]) -> None:
        if not pieces or self._drafter is None:
            return
        started = self._clock()
        try:
            host_keys, host_values = map(
                finite, self._drafter.records([piece for _, piece in pieces])
            )
        except Exception:
            # Tokens do not depend on records: only these rows are lost.
            log.exception("activation records could not be made", extra={"event": "records_failed"})
            return
        at = 0
        for lease, piece in pieces:
            n = piece.stop - piece.start
            if lease.records is not None and n:
                lease.records.write(piece.start, host_keys[at : at + n], host_values[at : at + n])
                lease.made.add(piece.start, piece.stop)
                self._untold.append(Recorded(lease, piece.start, piece.stop))
            at += n
        took = self._clock() - started
        self._row_seconds.append(took / max(1, at))
        self._metrics.forward_seconds.labels("records").observe(took)
