"""What is done with an exception in the model's thread: it is counted and logged, the session whose
work it was is told, and the thread goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cloud_verifier.engine.contract import Failed
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.records import Recorder
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.errors import NumericalError


class Faults:
    """Counts and logs exceptions in the model's thread."""

    def __init__(self, metrics: Metrics, recorder: Recorder) -> None:
        self._metrics = metrics
        self._recorder = recorder

    @contextlib.contextmanager
    def optional(self, where: str) -> Iterator[None]:
        """For what no token depends on, such as drafts of ours, records and metrics: an exception
        inside ends the block, and nothing else."""
        try:
            yield
        except Exception as error:
            self.count(where, error)
            if where == "records":
                self._recorder.drop()  # else the same rows raise again and again

    def count(self, where: str, error: Exception) -> None:
        """Log an exception and count it in the metrics; `where` names the part that raised it."""
        log.error(
            "%s failed: %s",
            where,
            error,
            exc_info=error,
            extra={"event": "engine_fault", "where": where},
        )
        with contextlib.suppress(Exception):
            self._metrics.engine_faults.labels(where).inc()

    def failed(self, lease: Lease, job: Job | None, error: Exception) -> Failed:
        """Log that the work of one session has raised, and return the report by which the session
        is told."""
        # Logits that are no numbers are the model's doing: where in our code that showed up helps
        # nobody.
        of_the_model = isinstance(error, NumericalError)
        log.error(
            "work of a session failed: %s",
            error,
            exc_info=None if of_the_model else error,
            extra={"session": lease.session, "event": "quarantine"},
        )
        with self.optional("metrics"):
            self._metrics.quarantined.inc()
        return Failed(lease, job, str(error) if of_the_model else type(error).__name__)
