"""The shell around a `Scheduler`: lock, clock and waiting. The event loop submits, the model's
thread takes steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from cloud_verifier.engine.scheduler import EngineStep, Scheduler, StepOutcome
from cloud_verifier.engine.work import Job, Lease


class Workload:
    """A scheduler that two threads use."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._changed = threading.Condition()
        self._woken = self._stopped = False
        self._step: EngineStep | None = None
        """The step that the model's thread has taken and not come back from."""

    # ---- for the event loop

    @property
    def queued(self) -> int:
        """Rounds waiting for the model."""
        return self._scheduler.queued

    def submit(self, job: Job) -> None:
        """Queue a round; a `Refusal` when there is no room."""
        with self._changed:
            self._scheduler.submit(job, self._clock())
            self._changed.notify()

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """Have the slot hold the first `goal` tokens of `ids`."""
        with self._changed:
            self._scheduler.prefill(lease, ids, goal)
            self._changed.notify()

    def release(self, lease: Lease) -> None:
        """Void the lease and release its slot; a round that is still queued for it is not run."""
        with self._changed:
            self._scheduler.release(lease)
            self._changed.notify()

    def holds(self, job: Job) -> bool:
        """Whether a round waits or runs. One that does neither, and of which nothing was reported,
        is lost."""
        with self._changed:
            running = self._step is not None and job in (*self._step.jobs, *self._step.expired)
            return running or self._scheduler.holds(job)

    def wake(self) -> None:
        """Let the model's thread look around, although nothing is to be run."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """Wake the model's thread for the last time."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    # ---- for the model's thread

    def next(self, timeout: float) -> EngineStep | None:
        """The next step, after at most `timeout` seconds; None when there is none, or it is over."""
        with self._changed:
            self._step = None
            until = self._clock() + timeout
            while not self._stopped:
                now = self._clock()
                step = self._scheduler.schedule(now)
                if isinstance(step, EngineStep):
                    self._step = step
                    return step
                if self._woken or now >= until:
                    break
                self._changed.wait(min(step, until - now))
            self._woken = False
            return None

    def finished(self, step: EngineStep, outcome: StepOutcome) -> list[Job]:
        """The step has run; returns rounds that cannot run, because their prompts found no memory."""
        with self._changed:
            return self._scheduler.finished(step, outcome, self._clock())

    def background_room(self) -> float:
        """Seconds for which activation records may be made now."""
        with self._changed:
            return self._scheduler.background_room(self._clock())

    def background_ran(self, began: float) -> None:
        """Activation records were made since then."""
        with self._changed:
            self._scheduler.background_ran(began, self._clock())
