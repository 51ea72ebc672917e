"""What sessions ask of whatever runs their rounds. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cloud_verifier.engine.work import Job, Lease


class EngineWork(Protocol):
    """Rounds go in here; reports come to `Service.take`."""

    @property
    def queued(self) -> int:
        """Rounds that wait."""

    def submit(self, job: Job) -> None:
        """Queue a round; a `Refusal` when there is no room."""

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """Have the slot hold the first `goal` tokens of `ids`."""

    def release(self, lease: Lease) -> None:
        """Void the lease; a round that is still queued for it is not run."""

    def holds(self, job: Job) -> bool:
        """Whether a round waits or runs. One that does neither, and of which nothing was reported,
        is lost."""

    def wake(self) -> None:
        """Look around, although nothing is to be run."""
