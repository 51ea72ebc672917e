"""Activation records: made in the engine's thread, after the verdicts, newest tokens first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.contract import Post, Recorded, Report
from cloud_verifier.engine.job import Lease, finite
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.drafters.contract import Drafter
from moa.target.torch_target import Committed
from moa.wire.ranges import Ranges

_LEASES_AT_ONCE = 64
"""Most sessions whose rows are made in one batch."""
_LINGER = 0.02
"""Seconds that records may wait for an idle moment."""
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
        """Make records by `drafter`, at most so many `rows` in one batch, and report them by
        `post`."""
        self._drafter = drafter
        self._post = post
        self._rows = rows
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._pending: dict[Lease, None] = {}
        """Leases whose records are to be made, those with the newest rows last."""
        self._waiting: dict[Lease, None] = {}
        """Leases whose records nobody has asked for yet."""
        self._since = 0.0
        """When records were last made, or the first of those that wait came."""
        self._took = 0.0
        """Seconds that the latest batch took."""
        self._row_seconds: deque[float] = deque(maxlen=_LATEST)
        """Seconds a row of the latest batches. In a smaller batch a row takes longer: the next is
        smaller still, until one fits."""
        self._unreported: list[Report] = []
        """Records that have been made, and that the event loop has not been told of."""

    @property
    def pending(self) -> bool:
        """Whether there are records to make or to report."""
        if self._pending or self._unreported:
            return True
        return any(lease.eager_records for lease in self._waiting)

    @property
    def overdue(self) -> bool:
        """Whether they have waited too long for an idle moment."""
        return self.pending and self._clock() - self._since > max(_LINGER, self._took / _SHARE)

    def add(self, lease: Lease, committed: Committed) -> None:
        """Take committed tokens of a session, so that their activation records, the target's states
        that a drafter reads, can be made later."""
        if self._drafter is None or lease.records is None:
            return
        self._remember(self._drafter, lease, committed)
        few_wait = committed.stop - lease.backlog[0].start < _UNASKED * self._rows
        if not lease.eager_records and few_wait:
            self._waiting[lease] = None  # only the server's own drafter may want them, or nobody
            return
        self._waiting.pop(lease, None)
        if not self.pending:
            self._since = self._clock()
        self._pending.pop(lease, None)  # to the end: the latest session is served first
        self._pending[lease] = None

    def _remember(self, drafter: Drafter, lease: Lease, committed: Committed) -> None:
        """Add committed tokens to those whose records are still to be made."""
        backlog = lease.backlog
        if drafter.taps:
            # A record is made of a token's states and those of the token before it.
            follows = lease.newest_stop == committed.start
            before = lease.newest_states if follows else None
            backlog.append(replace(committed, before=before))
            lease.newest_stop = committed.stop
            lease.newest_states = committed.states[-1:].clone()
        else:
            backlog.append(replace(committed, tapped=None))
        # Each piece is a view that keeps the states of a whole forward in memory: after a few of
        # them the session's own are copied together.
        lease.uncopied += 1
        if lease.uncopied == _UNCOPIED:
            backlog[-_UNCOPIED:] = [Committed.joined(backlog[-_UNCOPIED:])]
            lease.uncopied = 0

    def forget(self, lease: Lease) -> None:
        """Make no more records of what is in the lease's slot, which is about to be given back."""
        lease.backlog.clear()
        lease.uncopied = 0
        lease.newest_stop = 0
        lease.newest_states = None
        self._pending.pop(lease, None)
        self._waiting.pop(lease, None)

    def drop(self) -> None:
        """Give up what is pending, because making it raises."""
        for lease in [*self._pending, *self._waiting]:
            self.forget(lease)
        self._unreported = []

    def go(self, seconds: float) -> bool:
        """Make records for about so many seconds: those of the latest sessions first, and of the
        newest tokens. Returns whether any were made."""
        began = self._clock()
        rows = self._rows_within(seconds)
        asked_for = [lease for lease in self._waiting if lease.eager_records]
        for lease in asked_for:
            del self._waiting[lease]
            self._pending[lease] = None
        if rows:
            latest = list(islice(reversed(self._pending), _LEASES_AT_ONCE))
            self._make(self._take_newest(latest, rows))
            self._since = self._clock()
            self._took = self._since - began
        self.report()
        return rows > 0

    def _rows_within(self, seconds: float) -> int:
        """Returns how many records one batch may have to take no longer than so many seconds, by
        the median of the latest batches; a few in any case if they are overdue."""
        if seconds == math.inf:
            return self._rows
        row_seconds = median(self._row_seconds) if self._row_seconds else 0.0
        # 0 where nothing was measured, or where the clock is too coarse for a few rows.
        rows = int(seconds / row_seconds) if row_seconds else _FEW
        if self.overdue:
            rows = max(rows, _FEW)
        return min(self._rows, max(rows, 0))

    def report(self) -> None:
        """Report the records to the event loop; called after the verdicts, which go first."""
        if self._unreported:
            self._post(self._unreported)
            self._unreported = []

    def finish(self, lease: Lease) -> bool:
        """Make one batch of this lease's missing records, to be reported later; returns whether all
        are made."""
        self._make(self._take_newest([lease], self._rows))
        return not lease.backlog

    def can_copy(self, source: Lease, lease: Lease, rows: int) -> bool:
        """Whether the first `rows` records of `lease` can be had from `source`, which has made or
        queued all of them; also if `lease` needs none."""
        if lease.records is None:
            return True
        known = Ranges(source.made)
        for piece in source.backlog:
            known.add(piece.start, piece.stop)
        return source.records is not None and known.newest_missing(rows, 1) is None

    def copy(self, source: Lease, lease: Lease, rows: int) -> None:
        """Give `lease` the records of its first `rows` tokens, which it shares with `source`: those
        that exist are copied, the others will be made for each of the two."""
        if lease.records is None or source.records is None or (slot := lease.slot) is None:
            return
        if not self.pending:
            self._since = self._clock()
        for start, stop in source.made:
            stop = min(stop, rows)
            if start < stop:
                keys, values = source.records.read(start, stop)
                lease.records.write(start, keys, values)
                lease.made.add(start, stop)
                self._unreported.append(Recorded(lease, start, stop))
        shared = [piece for piece in source.backlog if piece.start < rows]
        lease.backlog = [replace(piece.part(0, rows - piece.start), slot=slot) for piece in shared]
        if lease.backlog:
            self._pending[lease] = None

    def _take_newest(self, leases: Iterable[Lease], room: int) -> list[tuple[Lease, Committed]]:
        """Take up to `room` records' worth of the newest tokens out of these leases' backlogs, to
        be made now. Returns the pieces with their leases."""
        pieces: list[tuple[Lease, Committed]] = []
        for lease in leases:
            while room > 0 and lease.backlog:
                newest = _take_end(lease.backlog, room)
                room -= newest.stop - newest.start
                pieces.append((lease, newest))
            # Only pieces that follow one another are copied together, and what comes next does not
            # follow what is left.
            lease.uncopied = 0
            if not lease.backlog:
                self._pending.pop(lease, None)
                self._waiting.pop(lease, None)
        return pieces

    @torch.inference_mode()
    def _make(self, pieces: list[tuple[Lease, Committed]]) -> None:
        """Make the records of these pieces in one batch, store them with their leases, and measure
        how long one takes."""
        if not pieces or self._drafter is None:
            return
        started = self._clock()
        try:
            keys, values = map(finite, self._drafter.records([piece for _, piece in pieces]))
        except Exception:
            # Tokens do not depend on records: only these rows are lost.
            log.exception("activation records could not be made", extra={"event": "records_failed"})
            return
        rows = self._store(pieces, keys, values)
        took = self._clock() - started
        self._row_seconds.append(took / max(1, rows))
        self._metrics.forward_seconds.labels("records").observe(took)

    def _store(
        self,
        pieces: list[tuple[Lease, Committed]],
        keys: NDArray[np.float16],
        values: NDArray[np.float16],
    ) -> int:
        """Store the records of these pieces, a row each, one piece behind another, with their
        leases; returns how many rows there are."""
        row = 0
        for lease, piece in pieces:
            stop_row = row + piece.stop - piece.start
            if lease.records is not None and stop_row > row:
                lease.records.write(piece.start, keys[row:stop_row], values[row:stop_row])
                lease.made.add(piece.start, piece.stop)
                self._unreported.append(Recorded(lease, piece.start, piece.stop))
            row = stop_row
        return row


def _take_end(backlog: list[Committed], most: int) -> Committed:
    """Take the newest piece out of a backlog, or its last `most` tokens: then the rest is left."""
    newest = backlog.pop()
    size = newest.stop - newest.start
    if size <= most:
        return newest
    backlog.append(newest.part(0, size - most))
    return newest.part(size - most, size)
