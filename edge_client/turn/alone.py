"""Writing without the verifier: provisional tokens, for as long as the drafter can be trusted alone."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from edge_client.drafter.onnx import Drafter
from edge_client.tools.trace import Trace
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.reconcile import Turn
from edge_client.turn.stats import Stats
from moa.sampling import SamplingSettings


@dataclass
class Alone:
    """What the device writes by itself."""

    turn: Turn
    drafter: Drafter
    guard: OfflineGuard
    sampling: SamplingSettings
    stats: Stats
    trace: Trace
    settle_seconds: float = 5.0
    """How long to wait for the link when nothing more can be written."""
    _stuck_since: float | None = None

    @property
    def may_write(self) -> bool:
        """Whether another provisional token may follow."""
        return not self.turn.finish and not self.guard.stops(len(self.turn.provisional))

    def write(self) -> str:
        """Write one provisional token; perhaps a warning."""
        with self.trace.span("offline token"):
            self.turn.extend(self.drafter.guess(self.turn.ids, self.sampling))
        self.stats.offline_tokens += 1
        return self.guard.warning(len(self.turn.provisional))

    def still_waits(self) -> bool:
        """With nothing left to write: whether the link is still worth waiting for."""
        now = perf_counter()
        self._stuck_since = self._stuck_since or now
        return now - self._stuck_since < self.settle_seconds

    def checked(self) -> None:
        """The verifier has seen all that was written."""
        self.guard.reset()
        self._stuck_since = None
