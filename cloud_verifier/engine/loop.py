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
from collections.abc import Callable, Iterable, Iterator, Sequence

from cloud_verifier.engine.contract import Failed, Post, Recorded, Report
from cloud_verifier.engine.draft import StreamDrafter
from cloud_verifier.engine.faults import Faults
from cloud_verifier.engine.holding import HeldSlots
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.records import Recorder
from cloud_verifier.engine.run import Decided, NotRun, Plan, Ran, StepRunner
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
_JOIN_SECONDS = 60.0
"""How long the end of the thread is waited for: a forward that has begun cannot be stopped."""


class Workload:
    """A scheduler that two threads use: the event loop submits, the model's thread takes steps. It
    adds the lock, the clock and the waiting."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        """Share this scheduler between the event loop and the model's thread."""
        self._scheduler = scheduler
        self._clock = clock
        self._changed = threading.Condition()
        """Guards everything here, and wakes the model's thread."""
        self._woken = False
        """Whether the thread is to look around, although there may be no step for it."""
        self._stopped = False
        """Whether there are no more steps."""
        self._step: EngineStep | None = None
        """The step that the model's thread has taken and not come back from."""

    # ---- for the event loop

    @property
    def queued(self) -> int:
        """Rounds waiting for the model."""
        return self._scheduler.queued

    def submit(self, job: Job) -> None:
        """Queue a round, or raise a `Refusal` when there is no room."""
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
            if self._step is not None and job in (*self._step.jobs, *self._step.expired):
                return True
            return self._scheduler.holds(job)

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
        """Returns the next step, one forward of the model, and waits for it at most `timeout`
        seconds. None if there is none by then, or if the thread was woken or stopped."""
        with self._changed:
            self._step = None
            until = self._clock() + timeout
            while not self._stopped:
                now = self._clock()
                step_or_seconds = self._scheduler.schedule(now)
                if isinstance(step_or_seconds, EngineStep):
                    self._step = step_or_seconds
                    return step_or_seconds
                if self._woken or now >= until:
                    break
                self._changed.wait(min(step_or_seconds, until - now))
            self._woken = False
            return None

    def finished(self, step: EngineStep, outcome: StepOutcome) -> list[Job]:
        """Tell the scheduler that the step has run. Returns rounds that cannot run, because their
        prompts found no memory."""
        with self._changed:
            return self._scheduler.finished(step, outcome, self._clock())

    def background_room(self) -> float:
        """Seconds for which activation records may be made now."""
        with self._changed:
            return self._scheduler.background_room(self._clock())

    def background_ran(self, began: float) -> None:
        """Tell the scheduler that activation records were made since the time `began`."""
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
        """Make the engine around the target model; its thread does not run yet. What becomes of the
        work is told by `post`; `died` is called, in the thread, if that ends without having been
        told to."""
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
        """Turns in a row that have raised."""
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
            self._thread.join(timeout=_JOIN_SECONDS)
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
        """Run one turn after another in the model's thread, until it is stopped, or too many in a
        row raise."""
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
        """Wait at most `timeout` seconds for the next step and run it, then do what can be done
        beside it. Returns whether there was any work. What raises fails the sessions whose work it
        was; the turn after it goes on with the others."""
        try:
            step = self._work.next(timeout)
            busy = step is not None or self._recorder.pending
            if step is not None:
                self._run_step(step)
            self._at_hand = {}
            self._do_background_work(idle=step is None)
        except _CannotTell:
            raise  # nobody would hear of anything that follows
        except Exception as error:
            self._faults_in_a_row += 1
            self._faults.count("turn", error)
            if self._faults_in_a_row == _MOST_FAULTS_IN_A_ROW:
                raise  # it does not mend itself: the thread ends
            for lease, job in list(self._at_hand.items()):
                self._report([self._faults.failed(lease, job, error)])
            return True
        self._faults_in_a_row = 0
        return busy

    def _run_step(self, step: EngineStep) -> None:
        """Run what the scheduler has planned, and send each answer as soon as it is decided. If the
        forward raises, its rows run again one by one, so that only the one that raises fails."""
        self._at_hand = {job.lease: job for job in (*step.expired, *step.jobs)}
        self._at_hand |= {piece.lease: None for piece in step.prefill}
        plan = self._runner.prepare(step)
        self._report(plan.reports)
        outcome = StepOutcome(left_out=plan.left_out_of(step), full=plan.full)
        if plan.rows:
            ran = self._runner.run(plan)
            results: Iterable[Ran | NotRun] = [ran]
            if isinstance(ran, NotRun) and plan.rows > 1:
                outcome.ran = False  # as planned
                results = self._run_row_by_row(plan, ran.error)
            for result in results:
                decided = self._runner.decide(result)
                self._report(decided.reports)
                if isinstance(result, Ran):
                    # What can wait does so until the answers are sent.
                    self._report(self._runner.conclude(result, decided))
                _note_outcome(outcome, result, decided)
        self._end_step(step, outcome)

    def _end_step(self, step: EngineStep, outcome: StepOutcome) -> None:
        """Let the scheduler learn from a step, and queue again what goes on; then report what
        cannot go on, and the activation records that were made."""
        self._at_hand |= {job.lease: job for job in outcome.run_again}
        self.alive_at = outcome.ended or self.alive_at
        found_no_memory = self._work.finished(step, outcome)
        self._report([self._runner.no_memory(job) for job in found_no_memory])
        with self._faults.optional("records"):
            self._recorder.report()

    def _run_row_by_row(self, plan: Plan, error: Exception) -> Iterator[Ran | NotRun]:
        """Run each row of a plan alone, because this error of one of them has cost all of them
        their forward. Each row is answered before the next one runs."""
        self._faults.count("batch", error)
        for row in plan.row_by_row():
            yield self._runner.run(row)

    def _do_background_work(self, *, idle: bool) -> None:
        """See whether the model still works. In idle time prepare it further, and make activation
        records; these also when they are overdue."""
        self._probe_if_due()
        if idle and self.target.unprepared:
            with self._faults.optional("graphs"):
                self.target.prepare_more()
        if self._recorder.pending and (idle or self._recorder.overdue):
            self._make_records()

    def _make_records(self) -> None:
        """Make activation records, the target's hidden states that drafters read, for as long as
        streams leave room for that."""
        began = self._clock()
        made = False
        room = self._work.background_room()
        with self._faults.optional("records"):
            made = self._recorder.go(room)
        if made:
            self._work.background_ran(began)

    def _report(self, reports: list[Report]) -> None:
        """Tell the event loop what became of this work; if that raises, tell it at least that the
        work has failed. What was told is no longer at hand."""
        if not reports:
            return
        reported = _work_of(reports)
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
        """Run one token if no forward has succeeded for long, and count it if that raises."""
        if self._stopping or self._clock() - self.alive_at < PROBE_SECONDS:
            return
        try:
            self._probe()
        except Exception as error:
            self._faults.count("probe", error)

    def _probe(self) -> None:
        """Run one token; it raises if no forward can succeed."""
        self._slots.run_one_token()
        self.alive_at = self._clock()


def _work_of(reports: Iterable[Report]) -> list[tuple[Lease, Job | None]]:
    """Returns the work that these reports are about: each lease, with its round if it is one."""
    work: list[tuple[Lease, Job | None]] = []
    for report in reports:
        if isinstance(report, Failed):
            work.append((report.lease, report.job))
        elif not isinstance(report, Recorded):  # records are nobody's answer
            work.append((report.job.lease, report.job))
    return work


def _note_outcome(outcome: StepOutcome, result: Ran | NotRun, decided: Decided) -> None:
    """Add one forward of a step to what became of the step."""
    if isinstance(result, Ran):
        outcome.ended = result.ended
        outcome.extra_seconds += result.extra_seconds
    else:
        outcome.ran = False
    outcome.run_again += decided.run_again
    outcome.full += decided.full


class _CannotTell(Exception):
    """No session can be told anything: the event loop does not take reports."""
