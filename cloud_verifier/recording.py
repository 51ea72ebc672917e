"""Activation records: made in the engine's thread, after the verdicts, newest tokens first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch

from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.work import Lease, Post, Recorded, Report
from moa.model.drafter import Drafter
from moa.model.target import Committed
from moa.wire.ranges import Ranges

_LEASES_AT_ONCE = 64
_LINGER = 0.02  # seconds that records may wait for an idle moment
_UNASKED = 16
"""So many batches of a session's rows may wait while nobody has asked for them: the server's own drafter may never."""


@dataclass(slots=True)
class _Backlog:
    """Committed tokens from position `start` on without records."""

    start: int
    rows: Committed

    def __len__(self) -> int:
        return len(self.rows.positions)

    def take_newest(self, most: int) -> _Backlog:
        """Cut up to `most` rows off the end."""
        cut = max(0, len(self) - most)
        newest = _Backlog(self.start + cut, self.rows.part(cut, len(self)))
        self.rows = self.rows.part(0, cut)
        return newest

    def head(self, most: int, slot: int) -> _Backlog:
        """The first rows, `most` at most, as another slot holds them too."""
        return _Backlog(self.start, replace(self.rows.part(0, min(most, len(self))), slot=slot))


class Recorder:
    """Runs LSA and CA's projections on committed tokens, and stores the records for the event loop."""

    def __init__(
        self,
        drafter: Drafter | None,
        post: Post,
        *,
        rows: int = 128,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._post, self._rows, self._metrics, self._clock = post, rows, metrics or Metrics(), clock
        self._pending: dict[Lease, None] = {}
        self._waiting: dict[Lease, None] = {}
        """Leases whose records nobody has asked for yet."""
        self._since = 0.0
        self._untold: list[Report] = []

    @property
    def pending(self) -> bool:
        """Whether there are records to make or to report."""
        return bool(self._pending or self._untold) or any(lease.eager_records for lease in self._waiting)

    @property
    def overdue(self) -> bool:
        """Whether they have waited too long for an idle moment."""
        return self.pending and self._clock() - self._since > _LINGER

    def add(self, lease: Lease, start: int, committed: Committed) -> None:
        """Remember tokens that were committed at positions from `start` on."""
        if self._drafter is None or lease.records is None:
            return
        if not lease.eager_records:  # these wait long, and must not keep the whole batch's states
            committed = replace(committed, hidden=committed.hidden.clone())
        lease.backlog.append(_Backlog(start, committed))
        held = start + len(committed.positions) - lease.backlog[0].start
        if not lease.eager_records and held < _UNASKED * self._rows:
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
        self._pending.pop(lease, None)
        self._waiting.pop(lease, None)

    def go(self) -> None:
        """Make some records: latest sessions first, newest rows first."""
        self._since = self._clock()
        for lease in [lease for lease in self._waiting if lease.eager_records]:
            del self._waiting[lease]
            self._pending[lease] = None
        self._make(self._newest(list(islice(reversed(self._pending), _LEASES_AT_ONCE))))
        self.report()

    def report(self) -> None:
        """Report the records to the event loop; called after the verdicts, which go first."""
        if self._untold:
            self._post(self._untold)
            self._untold = []

    def finish(self, lease: Lease) -> bool:
        """Make one batch of this lease's missing records, to be reported later; returns whether all are made."""
        self._make(self._newest([lease]))
        return not lease.backlog

    def can_copy(self, source: Lease, lease: Lease, rows: int) -> bool:
        """Whether `lease` needs no records, or `source` has made or queued all of its first `rows` rows."""
        if lease.records is None:
            return True
        known = Ranges(source.made)
        for piece in source.backlog:
            known.add(piece.start, piece.start + len(piece))
        return source.records is not None and known.newest_missing(rows, 1) is None

    def copy(self, source: Lease, lease: Lease, rows: int) -> None:
        """Give `lease` the first rows of `source`: records that exist are copied, missing ones will be made for
        each."""
        if lease.records is None or source.records is None or (slot := lease.slot) is None:
            return
        if not self.pending:
            self._since = self._clock()
        for start, stop in source.made:
            if start < rows:
                lease.records.write(start, *source.records.read(start, min(stop, rows)))
                lease.made.add(start, min(stop, rows))
                self._untold.append(Recorded(lease, start, min(stop, rows)))
        lease.backlog = [piece.head(rows - piece.start, slot) for piece in source.backlog if piece.start < rows]
        if lease.backlog:
            self._pending[lease] = None

    def _newest(self, leases: Iterable[Lease]) -> list[tuple[Lease, _Backlog]]:
        """Take up to one batch of rows from the ends of these leases' backlogs."""
        room = self._rows
        pieces: list[tuple[Lease, _Backlog]] = []
        for lease in leases:
            while room > 0 and lease.backlog:
                newest = lease.backlog[-1].take_newest(room)
                if not len(lease.backlog[-1]):
                    lease.backlog.pop()
                room -= len(newest)
                pieces.append((lease, newest))
            if not lease.backlog:
                self._pending.pop(lease, None)
                self._waiting.pop(lease, None)
        return pieces

    @torch.inference_mode()
    def _make(self, pieces: list[tuple[Lease, _Backlog]]) -> None:
        if not pieces or self._drafter is None:
            return
        started = self._clock()
        rows = [piece.rows for _, piece in pieces]
        try:
            kept_keys, kept_values = torch.cat([r.k for r in rows], 1), torch.cat([r.v for r in rows], 1)
            hidden, positions = torch.cat([r.hidden for r in rows]), torch.cat([r.positions for r in rows])
            keys, values = self._drafter.project(kept_keys, kept_values, hidden, positions)
            layout, last = self._drafter.layout, len(rows[0].k) - self._drafter.config.tli
            host_keys, host_values = (
                layout.join([part.float().cpu().numpy() for part in (made, *theirs[last:])])
                for made, theirs in ((keys, kept_keys), (values, kept_values))
            )
        except Exception:
            # Tokens do not depend on records: only these rows are lost.
            log.exception("activation records could not be made", extra={"event": "records_failed"})
            return
        at = 0
        for lease, piece in pieces:
            n = len(piece)
            if lease.records is not None and n:
                lease.records.write(piece.start, host_keys[at : at + n], host_values[at : at + n])
                lease.made.add(piece.start, piece.start + n)
                self._untold.append(Recorded(lease, piece.start, piece.start + n))
            at += n
        self._metrics.forward_seconds.labels("records").observe(self._clock() - started)
