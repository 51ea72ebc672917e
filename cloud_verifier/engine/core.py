"""The one thread that owns the model. One step in, one outcome out: a forward of drafts and pieces of prompts, the
accept rule, commits, reports; then activation records.

A verdict is reported as soon as its row is decided; records are made afterwards, in idle time or in small batches
between forwards, so that a verdict never waits for its activations, and hardly for those of others.

Whatever raises here costs the work at hand and nothing else: its sessions are told (`Failed`), a counter and the log
say so, and the loop goes on. A batch that raises runs again row by row, so that only the row that raises fails. Drafts
of ours, records and metrics only make things faster: where they raise, no session fails. If no session can be told, or
turn after turn raises, the thread ends, and `died` ends the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from cloud_verifier.engine.masks import mask_rows
from cloud_verifier.engine.recording import Recorder
from cloud_verifier.engine.scheduler import EngineStep, PrefillPiece, StepOutcome
from cloud_verifier.engine.stream_drafting import FlatTree, ServerDrafting
from cloud_verifier.engine.work import Answered, Dropped, Failed, Job, Lease, Post, Recorded, Report, Waiting
from cloud_verifier.engine.workload import Workload
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.errors import FullError, NumericalError
from moa.grammar.spec import GrammarError
from moa.model.choosing import accept_rows, log_probabilities
from moa.model.target import Row, Step, Target
from moa.tree import Accepted
from moa.wire.codes import Code, Refusal
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import Stream, StreamTokens, Verdict, Verify

_PAUSE = 0.001
"""Seconds without work before records are made: a nearby client has sent its next draft before that."""
_MASK_SECONDS = 0.01
"""For the masks of a batch: what has no mask by then is dropped from its draft, or the row waits for the next batch."""
_FULL_RETRY_SECONDS = 0.25
PROBE_SECONDS = 5.0
"""Where no forward has succeeded for so long, one token is run to see whether one can."""
_STALE_SECONDS = 60.0
"""If the last forward is older than this, the model counts as unhealthy."""
_MOST_FAULTS_IN_A_ROW = 16
"""So many turns that raise, one after another, end the thread."""


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
        drafting: ServerDrafting | None = None,
        most_guesses: int = 63,
        died: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`died` is called, in the thread, when it ends without having been told to."""
        self.target = target
        self.alive_at = clock()
        """When the last forward ended, or this was made."""
        self._work, self._post = work, post
        self._decode = decode
        self._metrics = metrics or Metrics()
        self._recorder, self._drafting = recorder, drafting or ServerDrafting()
        self._most_guesses = most_guesses
        self._died, self._clock = died, clock
        self._at_hand: dict[Lease, Job | None] = {}
        """The work at hand: leases of which nothing has been reported yet, and their rounds."""
        self._faults_in_a_row = 0
        self._leases: dict[Lease, None] = {}
        self._stopping = False
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Run one token to see that the model works, then start the thread."""
        self._run_one_token()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current work."""
        self._stopping = True
        self._work.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=60)
        self._masks.shutdown()

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
            log.critical("the engine ends: %s", type(error).__name__, exc_info=error, extra={"event": "engine_died"})
            self._died()

    def turn(self, timeout: float) -> bool:
        """Do the next piece of work; make records when there is none, or when they are overdue. Whether it did any."""
        try:
            step = self._work.next(timeout)
            busy = step is not None or self._recorder.pending
            if step is not None:
                self._at_hand = {job.lease: job for job in [*step.expired, *step.jobs]}
                self._at_hand |= {piece.lease: None for piece in step.prefill}
                self._release_all(step.releases)
                self._drop(step.expired)
                outcome = StepOutcome()
                self._run_batch(step.jobs, step.prefill, step, outcome)
                for job in self._work.finished(step, outcome):
                    self._drop_for_memory(job)
                self._hint("records", self._recorder.report)
            self._at_hand = {}
            if self._clock() - self.alive_at >= PROBE_SECONDS and not self._stopping:
                self._probe()
            if step is None and (runner := self.target.runner) is not None and runner.graphs.unprepared:
                self._hint("graphs", runner.graphs.prepare)
            if self._recorder.pending and (step is None or self._recorder.overdue):
                began, room = self._clock(), self._work.background_room()
                if self._hint("records", lambda: self._recorder.go(room)):
                    self._work.background_ran(began)
        except _CannotTell:
            raise
        except Exception as error:
            self._faults_in_a_row += 1
            self._fault("turn", error)
            if self._faults_in_a_row == _MOST_FAULTS_IN_A_ROW:
                raise
            self._fail_all(error)
            return True
        self._faults_in_a_row = 0
        return busy

    # ---- forwards

    def _run_batch(
        self, jobs: Sequence[Job], pieces: Sequence[PrefillPiece], planned: EngineStep, outcome: StepOutcome
    ) -> None:
        """Run drafts and pieces of prompts in one forward; rows that cannot run are reported, and the others run."""
        between = self._between(jobs)
        guesses = {job: self._guesses(job, planned.worth) for job in jobs if job.guesses is not None}
        waiting = {job for job, draft in guesses.items() if draft is None and job.guesses and job.guesses.waits}
        self._report([Waiting(job) for job in waiting])
        jobs = [job for job in jobs if job not in waiting and self._claim(job.lease, job, outcome)]
        claimed = [one for one in pieces if self._claim(one.lease, None, outcome)]
        pieces = [one for one in claimed if one.size and one.lease.length < one.goal]
        if not jobs and not pieces:
            return
        started = self._clock()
        try:
            drafts = self._drafts(jobs, pieces, guesses)
            drafted = self._clock()
            outcome.extra += drafted - started
            rows = [self._row(job, draft) for job, draft in zip(jobs, drafts, strict=True)]
            grammars = any(job.matcher is not None for job in jobs)
            until = time.perf_counter() + _MASK_SECONDS
            masking = self._masks.submit(mask_rows, jobs, drafts, until) if grammars else None  # beside the forward
            try:
                step = self.target.forward([*rows, *map(_piece_row, pieces)])
                if masking:
                    step.wait()  # what the masks take longer is theirs
            finally:
                ran = self._clock()
                wait([masking] if masking else [])  # matchers are used again, whatever happens
                outcome.extra += self._clock() - ran
            judged, late, failed = masking.result() if masking else mask_rows(jobs, drafts, until)
            for lease in [*(job.lease for job in jobs), *(piece.lease for piece in pieces)]:
                self._note_held(lease)
            accepted = accept_rows(step, judged)
            if len(accepted) != len(jobs):
                raise ValueError(f"{len(accepted)} rows of {len(jobs)} were judged")
            step.wait()
        except Exception as error:
            outcome.ran = False
            if len(jobs) + len(pieces) == 1:
                self._fail_row(jobs[0].lease if jobs else pieces[0].lease, jobs[0] if jobs else None, error, outcome)
            else:  # run each alone to find which one raised
                self._fault("batch", error)
                for job in jobs:
                    self._run_batch([job], [], planned, outcome)
                for piece in pieces:
                    self._run_batch([], [piece], planned, outcome)
            return
        self.alive_at = ended = self._clock()
        reports: list[Report] = []
        won: dict[Job, int] = {}
        for b, (job, draft) in enumerate(zip(jobs, drafts, strict=True)):
            if job in late:
                outcome.again.append(job)
                continue
            if job in failed:
                self._fail_row(job.lease, job, failed[job], outcome)
                continue
            began = drafted if isinstance(job.request, Verify) else started
            timing = 1000 * (began - job.enqueued), 1000 * (ended - began), len(jobs)
            try:
                foreseen = len(draft[0]) - 1 if guesses.get(job) is not None else 0
                reports.append(self._settle(step, b, job, draft, accepted[b], timing, foreseen))
                if isinstance(job.request, Stream) and guesses.get(job) is None:
                    won[job] = len(accepted[b].path) - 1
            except Exception as error:
                self._fail(job.lease, job, error)
        self._report(reports)
        for b, piece in enumerate(pieces, len(jobs)):
            try:
                self._commit(step, b, piece.lease, range(step.batch.sizes[b]))
            except Exception as error:
                self._fail(piece.lease, None, error)
        self._hint("metrics", lambda: self._count(step, jobs, ended - drafted))
        rest = self._clock() - ended if between is None else between
        self._hint("drafting", lambda: self._drafting.ran(won, sum(step.batch.sizes), ended - drafted + rest))
        for report in reports:
            match report:
                case Answered(job, StreamTokens(done=False) as answer):
                    job.enqueued = ended
                    job.sent(len(answer.tokens), ended)
                    outcome.again.append(job)
                    self._at_hand[job.lease] = job

    def _between(self, jobs: Sequence[Job]) -> float | None:
        """Seconds since the latest forward, where streams go on from it: these are a part of every round of theirs.
        What comes between a forward and a request that arrives later is not; then nobody knows yet."""
        if any(job.enqueued == self.alive_at for job in jobs):
            return self._clock() - self.alive_at
        return None

    def _count(self, step: Step, jobs: Sequence[Job], seconds: float) -> None:
        self._metrics.forward_seconds.labels("draft" if jobs else "prompt").observe(seconds)
        self._metrics.prompt_tokens.inc(sum(step.batch.sizes[len(jobs) :]))
        path, _, tier = step.path.partition(" ")
        self._metrics.forwards.labels(path, tier).inc()
        if jobs:
            self._metrics.batch_rows.observe(len(jobs))

    def _guesses(self, job: Job, worth: float) -> FlatTree | None:
        """The edge's guesses for a stream, if they are worth verifying."""
        if job.guesses is None or not isinstance(request := job.request, Stream):
            return None
        room = min(self._most_guesses, self.target.pool.capacity - job.base - 1)
        picked = job.guesses.pick(job.ids, room, worth, branches=self.target.trees)
        if len(picked.tokens) == 1:
            return None
        ours = 0.0
        if request.speculate and not job.guesses.waits:
            ours = self._hint("drafting", lambda: self._drafting.matching(job)) or 0.0
        return picked[:2] if picked.expected >= ours else None

    def _drafts(
        self, jobs: Sequence[Job], pieces: Sequence[PrefillPiece], guesses: Mapping[Job, FlatTree | None]
    ) -> list[FlatTree]:
        made: dict[Job, FlatTree] = {}
        for job in jobs:
            if isinstance(request := job.request, Verify):
                made[job] = request.tokens, request.parents or range(-1, len(request.tokens) - 1)
            elif (draft := guesses.get(job)) is not None:
                made[job] = draft
        if streams := [job for job in jobs if job not in made]:
            beside = sum(len(tokens) for tokens, _ in made.values()) + sum(piece.size for piece in pieces)
            ours = self._hint("drafting", lambda: self._drafting.draft(streams, beside))
            if ours is None or len(ours) != len(streams):
                ours = ServerDrafting().draft(streams)
            made |= zip(streams, ours, strict=True)
        for job, draft in made.items():
            job.nodes = len(draft[0])
        return [made[job] for job in jobs]

    def _row(self, job: Job, draft: FlatTree) -> Row:
        if job.lease.slot is None:
            raise RuntimeError("a row without a slot")
        # Sampled rows ask for the logits of the nodes they reach; only greedy ones need the best token of every node.
        best = job.sampling.plain_greedy and job.matcher is None
        return Row(job.lease.slot, *draft, judged="all" if best else "none")

    def _settle(
        self,
        step: Step,
        b: int,
        job: Job,
        draft: FlatTree,
        accepted: Accepted,
        timing: tuple[float, float, int],
        foreseen: int,
    ) -> Answered:
        """Decide a round. `timing`: milliseconds that it waited and ran, and the sessions that shared the forward;
        `foreseen`: nodes of the draft that the edge had sent."""
        path, next_token, finish = cut_path(
            job.rules, job.ids, draft[0], accepted.path, accepted.next_token, self._decode
        )
        new = [*(draft[0][node] for node in path[1:]), next_token]
        logprobs = log_probabilities(step, b, path, new, job.logprobs) if job.logprobs >= 0 else b""
        self._commit(step, b, job.lease, path)
        of, round, base, (queue_ms, forward_ms, batch) = job.lease.session, job.request.round, job.base, timing
        if isinstance(job.request, Verify):
            return Answered(
                job, Verdict(of, round, base, path, next_token, finish, queue_ms, forward_ms, batch, logprobs)
            )
        job.ids += new
        job.deadline = float("inf")  # it has begun
        done, drafted = bool(finish) or job.cancelled, len(draft[0]) - 1
        answer = StreamTokens(of, round, base, new, done, finish, drafted, queue_ms, forward_ms, logprobs, foreseen)
        return Answered(job, answer)

    # ---- slots

    def _claim(self, lease: Lease, job: Job | None, outcome: StepOutcome) -> bool:
        """Ensure that the lease has a slot; a new one shares the prefix that another lease of the principal has run."""
        if lease.revoked:
            return False
        if lease.slot is not None:
            return True
        try:
            self._take_slot(lease)
        except Exception as error:
            self._fail_row(lease, job, error, outcome)
            return False
        return True

    def _take_slot(self, lease: Lease) -> None:
        source, tokens, pool = lease.share, lease.start, self.target.pool
        lease.share = None
        if source is not None and tokens:
            tokens *= bool(self._hint("records", lambda: self._recorder.can_copy(source, lease, tokens)))
        if source is None or source.slot is None or not tokens:
            lease.slot = pool.acquire()
        else:
            lease.slot = pool.share(source.slot, tokens)
            self._hint("records", lambda: self._recorder.copy(source, lease, tokens))
            lease.length = tokens
            self._hint("drafting", lambda: self._drafting.shared(source, lease))
            self._metrics.shared_tokens.inc(tokens)
        self._leases[lease] = None
        self._note_held(lease)

    def _note_held(self, lease: Lease) -> None:
        if lease.slot is not None:
            lease.held = self.target.pool.held[lease.slot]

    def _commit(self, step: Step, b: int, lease: Lease, path: Sequence[int]) -> None:
        committed = self.target.commit(step, b, path)
        lease.length += len(path)
        self._hint("records", lambda: self._recorder.add(lease, committed))
        self._hint("drafting", lambda: self._drafting.committed(lease, step, b, path))

    def _release_all(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            for _ in range(2):  # else its slot is lost
                try:
                    self._release(lease)
                    break
                except Exception as error:
                    self._fault("release", error)

    def _release(self, lease: Lease) -> None:
        self._hint("records", lambda: self._recorder.forget(lease))
        self._hint("drafting", lambda: self._drafting.close(lease))
        self._leases.pop(lease, None)
        if lease.slot is not None:
            lease.held = 0  # before its pages are free: who counts both must not count them twice
            self.target.pool.release(lease.slot)
            lease.slot = None

    # ---- trouble

    def _drop(self, jobs: list[Job]) -> None:
        reports: list[Report] = []
        for job in jobs:
            if job.cancelled and isinstance(job.request, Stream):
                reports.append(Answered.ended(job))
            elif job.cancelled:
                reports.append(Dropped(job, Refusal(Code.CANCELLED, "cancelled before it ran")))
            else:
                waited = self._clock() - job.enqueued
                reports.append(Dropped(job, Refusal(Code.DEADLINE, f"not run within {waited:.2f} s")))
        self._report(reports)

    def _fail_row(self, lease: Lease, job: Job | None, error: Exception, outcome: StepOutcome) -> None:
        """Report that only this row did not run: the memory is full, or its work raised."""
        if isinstance(error, GrammarError) and job is not None:
            self._report([Dropped(job, Refusal(Code.GRAMMAR, str(error)))])
        elif not isinstance(error, FullError):
            self._fail(lease, job, error)
        elif job is not None:
            self._drop_for_memory(job)
        else:
            outcome.full.append(lease)

    def _drop_for_memory(self, job: Job) -> None:
        if isinstance(job.request, Stream) and job.base > job.request.base:
            self._report([Answered.ended(job)])  # it has begun: its tokens stay
            return
        wait = int(1000 * _FULL_RETRY_SECONDS)
        message = "the target's key/value memory is full"
        self._report([Dropped(job, Refusal(Code.BUSY, message, limit="kv_tokens", retry_after_ms=wait))])

    def _fail(self, lease: Lease, job: Job | None, error: Exception) -> None:
        known = isinstance(error, NumericalError)  # the model's doing: where in our code it showed helps nobody
        log.error(
            "work of a session failed: %s",
            error,
            exc_info=None if known else error,
            extra={"session": lease.session, "event": "quarantine"},
        )
        self._hint("metrics", self._metrics.quarantined.inc)
        self._report([Failed(lease, job, str(error) if known else type(error).__name__)])

    def _fail_all(self, error: Exception) -> None:
        """Report that the work at hand has failed, as far as nothing else was reported of it."""
        for lease, job in list(self._at_hand.items()):
            self._fail(lease, job, error)

    def _report(self, reports: list[Report]) -> None:
        """Tell the event loop; where that raises, tell it at least that this work has failed."""
        if not reports:
            return
        told = [
            (one.lease, one.job) if isinstance(one, Failed) else (one.job.lease, one.job)
            for one in reports
            if not isinstance(one, Recorded)
        ]
        try:
            self._post(reports)
        except Exception as error:
            self._fault("report", error)
            try:
                self._post([Failed(lease, job, type(error).__name__) for lease, job in told])
            except Exception as again:
                raise _CannotTell from again
        for lease, _ in told:
            self._at_hand.pop(lease, None)

    def _hint(self, where: str, do: Callable[[], Any]) -> Any:
        """Do what no token depends on; None where it raises."""
        try:
            return do()
        except Exception as error:
            self._fault(where, error)
            if where == "records":
                self._recorder.drop()
            return None

    def _fault(self, where: str, error: Exception) -> None:
        log.error("%s failed: %s", where, error, exc_info=error, extra={"event": "engine_fault", "where": where})
        with contextlib.suppress(Exception):
            self._metrics.engine_faults.labels(where).inc()

    def _probe(self) -> None:
        """See whether a forward succeeds."""
        try:
            self._run_one_token()
        except Exception as error:
            self._fault("probe", error)

    def _run_one_token(self) -> None:
        pool = self.target.pool
        own = pool.acquire() if pool.free else None
        held = (lease.slot for lease in self._leases if lease.slot is not None)
        slot = min(held, key=pool.lengths.__getitem__) if own is None else own
        try:
            self.target.forward([Row.chain(slot, [0])]).wait()
        except FullError:  # sessions hold all pages: as healthy as when they got them
            pass
        finally:
            if own is not None:
                pool.release(own)
        self.alive_at = self._clock()


class _CannotTell(Exception):
    """No session can be told anything: the event loop does not take reports."""


def _piece_row(piece: PrefillPiece) -> Row:
    if piece.lease.slot is None:
        raise RuntimeError("a row without a slot")
    start = piece.lease.length
    return Row.chain(piece.lease.slot, piece.ids[start : min(piece.goal, start + piece.size)], judged="none")
