"""The one thread that owns the model: it takes a step, has it run (`run.py`), and says what became of
it; then it makes activation records. `Workload` is where the event loop leaves the work.

    step = work.next(timeout)
    plan = runner.prepare(step)
    decided = runner.decide(runner.run(plan))
    report(decided)

Records are made in idle time or in small batches between forwards, so that a verdict never waits
for its activations, and hardly for those of others.

Whatever raises here costs the work at hand and nothing else: its sessions are told (`Failed`), a
counter and the log say so, and the loop goes on. If no session can be told, or turn after turn
raises, the thread ends, and `died` ends the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cloud_verifier.engine.contract import Failed, Post, Recorded, Report
from cloud_verifier.engine.draft import StreamDrafter
from cloud_verifier.engine.faults import Faults
from cloud_verifier.engine.holding import HeldSlots
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.records import Recorder
from cloud_verifier.engine.run import NotRun, Plan, Ran, StepRunner
from cloud_verifier.engine.schedule import EngineStep, Scheduler, StepOutcome
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.target.contract import Target
from moa.wire.finish import Decode

_PAUSE = 0.001
"""Seconds without work before records are made: a nearby client has sent its next draft before
that."""
PROBE_SECONDS = 5.0
"""Where no forward has succeeded for so long, one token is run to see whether one can."""
_STALE_SECONDS = 60.0
"""If the last forward is older than this, the model counts as unhealthy."""
_MOST_FAULTS_IN_A_ROW = 16
"""So many turns that raise, one after another, end the thread."""


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


class Engine:
    """Runs the scheduler's work, in its own thread."""

    def __init__(
        self,
        target: Target,
        recorder: Recorder,
        work: Workload,
        post: Post,
        *,
        decode: Decode | None = None,
        metrics: Metrics | None = None,
        drafting: StreamDrafter | None = None,
        most_guesses: int = 63,
        died: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`died` is called, in the thread, when it ends without having been told to."""
        self.target = target
        self.drafting = drafting or StreamDrafter()
        self.alive_at = clock()
        """When the last forward ended, or this was made."""
        metrics = metrics or Metrics()
        self._work = work
        self._recorder = recorder
        self._post = post
        self._faults = Faults(metrics, recorder)
        self._slots = HeldSlots(target, recorder, self.drafting, metrics, self._faults)
        self._runner = StepRunner(
            target,
            recorder,
            self.drafting,
            self._slots,
            decode=decode,
            metrics=metrics,
            faults=self._faults,
            most_guesses=most_guesses,
            clock=clock,
        )
        self._died = died
        self._clock = clock
        self._at_hand: dict[Lease, Job | None] = {}
        """The work at hand: leases of which nothing has been reported yet, and their rounds."""
        self._faults_in_a_row = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Run one token to see that the model works, then start the thread."""
        self._probe()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current work."""
        self._stopping = True
        self._work.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=60)
        self._runner.close()

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def wrong(self) -> str:
        """The model's problem; empty if it is healthy. For the event loop."""
        if not self.running:
            return "the engine has stopped"
        if self._clock() - self.alive_at > _STALE_SECONDS:
            return "no forward has succeeded lately"
        return ""

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn(_PAUSE if self._recorder.pending else PROBE_SECONDS)
        except BaseException as error:
            log.critical(
                "the engine ends: %s",
                type(error).__name__,
                exc_info=error,
                extra={"event": "engine_died"},
            )
            self._died()

    def turn(self, timeout: float) -> bool:
        """Do the next piece of work; make records when there is none, or when they are overdue.
        Whether it did any."""
        try:
            step = self._work.next(timeout)
            busy = step is not None or self._recorder.pending
            if step is not None:
                self._run_step(step)
            self._at_hand = {}
            self._probe_if_due()
            if step is None and self.target.unprepared:
                with self._faults.optional("graphs"):
                    self.target.prepare_more()
            if self._recorder.pending and (step is None or self._recorder.overdue):
                self._make_records()
        except _CannotTell:
            raise
        except Exception as error:
            self._faults_in_a_row += 1
            self._faults.count("turn", error)
            if self._faults_in_a_row == _MOST_FAULTS_IN_A_ROW:
                raise
            for lease, job in list(self._at_hand.items()):
                self._report([self._faults.failed(lease, job, error)])
            return True
        self._faults_in_a_row = 0
        return busy

    def _run_step(self, step: EngineStep) -> None:
        """Run what the scheduler has planned; a plan that raises again, row by row, to find the one
        that does. Answers are sent as soon as they are decided."""
        self._at_hand = {job.lease: job for job in (*step.expired, *step.jobs)}
        self._at_hand |= {piece.lease: None for piece in step.prefill}
        plan = self._runner.prepare(step)
        self._report(plan.reports)
        outcome = StepOutcome(full=plan.full)
        if plan.rows:
            for ran in self._attempts(plan):
                decided = self._runner.decide(ran)
                self._report(decided.reports)
                if isinstance(ran, Ran):
                    self._report(self._runner.conclude(ran, decided))
                    outcome.ended = ran.ended
                    outcome.extra += ran.extra
                outcome.ran &= ran.plan is plan and isinstance(ran, Ran)
                outcome.again += decided.again
                outcome.full += decided.full
        self._at_hand |= {job.lease: job for job in outcome.again}
        self.alive_at = outcome.ended or self.alive_at
        found_no_memory = self._work.finished(step, outcome)
        self._report([self._runner.no_memory(job) for job in found_no_memory])
        with self._faults.optional("records"):
            self._recorder.report()

    def _attempts(self, plan: Plan) -> Iterator[Ran | NotRun]:
        """One forward of all rows; of each row alone if that raises, to find the one that does."""
        ran = self._runner.run(plan)
        if isinstance(ran, Ran) or plan.rows == 1:
            yield ran
            return
        self._faults.count("batch", ran.error)
        for row in plan.row_by_row():
            yield self._runner.run(row)

    def _make_records(self) -> None:
        began = self._clock()
        made = False
        room = self._work.background_room()
        with self._faults.optional("records"):
            made = self._recorder.go(room)
        if made:
            self._work.background_ran(began)

    def _report(self, reports: list[Report]) -> None:
        """Tell the event loop; where that raises, tell it at least that this work has failed."""
        if not reports:
            return
        reported = [
            (one.lease, one.job) if isinstance(one, Failed) else (one.job.lease, one.job)
            for one in reports
            if not isinstance(one, Recorded)
        ]
        try:
            self._post(reports)
        except Exception as error:
            self._faults.count("report", error)
            reason = type(error).__name__
            try:
                self._post([Failed(lease, job, reason) for lease, job in reported])
            except Exception as another:
                raise _CannotTell from another
        for lease, _ in reported:
            self._at_hand.pop(lease, None)

    def _probe_if_due(self) -> None:
        """See now and then whether a forward succeeds, while none runs."""
        if self._stopping or self._clock() - self.alive_at < PROBE_SECONDS:
            return
        try:
            self._probe()
        except Exception as error:
            self._faults.count("probe", error)

    def _probe(self) -> None:
        self._slots.run_one_token()
        self.alive_at = self._clock()


class _CannotTell(Exception):
    """No session can be told anything: the event loop does not take reports."""
