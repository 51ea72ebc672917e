"""What one step does with the model: slots are given back and taken, drafts and pieces of prompts
run in one forward, rounds are decided by the accept rule and committed.

A verdict is reported as soon as its row is decided; its activation records are made later
(`recording.py`). A batch that raises runs again row by row, so that only the row that raises fails.
Drafts of ours, records and metrics only make things faster: where they raise, no session fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from cloud_verifier.engine.masks import mask_rows
from cloud_verifier.engine.recording import Recorder
from cloud_verifier.engine.scheduler import EngineStep, PrefillPiece, StepOutcome
from cloud_verifier.engine.stream_drafting import FlatTree, ServerDrafting
from cloud_verifier.engine.work import Answered, Dropped, Failed, Job, Lease, Report, Waiting
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from moa.errors import FullError, NumericalError
from moa.grammar.spec import GrammarError
from moa.target.choosing import Judged, accept_rows, log_probabilities
from moa.target.contract import Step, Target
from moa.target.rows import Row
from moa.tree import Accepted
from moa.wire.codes import Code, Refusal
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import Stream, StreamTokens, Verdict, Verify

_MASK_SECONDS = 0.01
"""For the masks of a batch: what has no mask by then is dropped from its draft, or the row waits
for the next batch."""
_FULL_RETRY_SECONDS = 0.25


class StepRunner:
    """Runs steps, one after another. Only the model's thread uses it."""

    def __init__(
        self,
        target: Target,
        recorder: Recorder,
        drafting: ServerDrafting,
        *,
        decode: Decode | None,
        metrics: Metrics,
        most_guesses: int,
        clock: Callable[[], float],
    ) -> None:
        self.leases: dict[Lease, None] = {}
        """Those that hold a slot."""
        self._target = target
        self._recorder = recorder
        self._drafting = drafting
        self._decode = decode
        self._metrics = metrics
        self._most_guesses = most_guesses
        self._clock = clock
        self._ended = clock()
        """When the latest forward ended, or this was made."""
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def close(self) -> None:
        """Run no more steps."""
        self._masks.shutdown()

    def run(self, planned: EngineStep, outcome: StepOutcome) -> Iterator[list[Report]]:
        """Run a step, and fill in its outcome; yields what is to be reported, as soon as that is
        known. Rounds and prompts that cannot run are reported, and the others run."""
        for lease in planned.releases:
            self._release(lease)
        yield [self._expired(job) for job in planned.expired]
        # What lies between two forwards of a stream is a part of each of its rounds. What lies
        # between a forward and a request that arrives later is not; then nobody knows yet.
        goes_on = any(job.enqueued == self._ended for job in planned.jobs)
        between = self._clock() - self._ended if goes_on else None
        guesses = {
            job: self._guesses(job, planned.worth)
            for job in planned.jobs
            if job.guesses is not None
        }
        waiting = {
            job
            for job, draft in guesses.items()
            if draft is None and job.guesses and job.guesses.waits
        }
        yield [Waiting(job) for job in waiting]
        jobs = [job for job in planned.jobs if job not in waiting]
        for lease, job in [
            *((job.lease, job) for job in jobs),
            *((piece.lease, None) for piece in planned.prefill),
        ]:
            if lease.slot is None and not lease.revoked:
                yield self._claim(lease, job, outcome)
        jobs = [job for job in jobs if job.lease.usable]
        pieces = [
            p for p in planned.prefill if p.lease.usable and p.size and p.lease.length < p.goal
        ]
        if not jobs and not pieces:
            return
        started = self._clock()
        try:
            made = self._drafts(jobs, guesses, sum(piece.size for piece in pieces))
            drafted = self._clock()
            outcome.extra += drafted - started
            step, accepted, late, failed = self._forward(jobs, made, pieces, outcome)
        except Exception as error:
            outcome.ran = False
            if len(jobs) + len(pieces) == 1:
                lease, job = (jobs[0].lease, jobs[0]) if jobs else (pieces[0].lease, None)
                yield self._not_run(lease, job, error, outcome)
                return
            self.fault("batch", error)  # run each alone to find which one raised
            for job in jobs:
                yield from self.run(EngineStep(jobs=[job], worth=planned.worth), outcome)
            for piece in pieces:
                yield from self.run(EngineStep(prefill=[piece], worth=planned.worth), outcome)
            return
        outcome.ended = self._ended = ended = self._clock()
        reports: list[Report] = []
        won: dict[Job, int] = {}
        for b, job in enumerate(jobs):
            if job in late:
                outcome.again.append(job)
                continue
            if job in failed:
                reports += self._not_run(job.lease, job, failed[job], outcome)
                continue
            began = drafted if isinstance(job.request, Verify) else started
            timing = 1000 * (began - job.enqueued), 1000 * (ended - began), len(jobs)
            try:
                foreseen = job.nodes - 1 if guesses.get(job) is not None else 0
                reports.append(self._settle(step, b, job, made[job], accepted[b], timing, foreseen))
                if isinstance(job.request, Stream) and guesses.get(job) is None:
                    won[job] = len(accepted[b].path) - 1
            except Exception as error:
                reports.append(self.failed(job.lease, job, error))
        yield reports
        for b, piece in enumerate(pieces, len(jobs)):
            try:
                self._commit(step, b, piece.lease, range(step.sizes[b]))
            except Exception as error:
                yield [self.failed(piece.lease, None, error)]
        self.hint("metrics", lambda: self._count(step, jobs, ended - drafted))
        rest = self._clock() - ended if between is None else between
        size = sum(step.sizes)
        seconds = ended - drafted + rest
        self.hint("drafting", lambda: self._drafting.ran(won, size, seconds))
        for report in reports:
            match report:
                case Answered(job, StreamTokens(done=False) as answer):
                    job.enqueued = ended
                    job.sent(len(answer.tokens), ended)
                    outcome.again.append(job)

    def _forward(
        self,
        jobs: Sequence[Job],
        made: Mapping[Job, FlatTree],
        pieces: Sequence[PrefillPiece],
        outcome: StepOutcome,
    ) -> tuple[Step, list[Accepted], Collection[Job], Mapping[Job, GrammarError]]:
        """Run drafts and pieces of prompts, beside it the masks of grammars; what of each draft is
        accepted, and the rounds whose masks were late or whose grammar is given up."""
        masking = None
        if any(job.matcher is not None for job in jobs):
            until = time.perf_counter() + _MASK_SECONDS
            masking = self._masks.submit(mask_rows, jobs, [made[job] for job in jobs], until)
        try:
            # Sampled rows ask for the logits of the nodes they reach; only greedy ones need the
            # best token of all.
            best = {job for job in jobs if job.sampling.plain_greedy and job.matcher is None}
            rows = [
                Row(_slot(job.lease), *made[job], judged="all" if job in best else "none")
                for job in jobs
            ]
            step = self._target.forward([*rows, *map(_piece_row, pieces)])
            if masking:
                step.wait()  # what the masks take longer is theirs
        finally:
            ran = self._clock()
            wait([masking] if masking else [])  # matchers are used again, whatever happens
            outcome.extra += self._clock() - ran
        if masking:
            judged, late, failed = masking.result()
        else:
            judged = [Judged(*made[job], job.ids, job.sampling) for job in jobs]
            late = set()
            failed = {}
        for lease in [*(job.lease for job in jobs), *(piece.lease for piece in pieces)]:
            lease.held = self._target.cache.pages_held[_slot(lease)]
        accepted = accept_rows(step, judged)
        if len(accepted) != len(jobs):
            raise ValueError(f"{len(accepted)} rows of {len(jobs)} were judged")
        step.wait()
        return step, accepted, late, failed

    def run_one_token(self) -> None:
        """See whether a forward succeeds: in a slot of its own or, where none is free, behind the
        shortest session."""
        pool = self._target.cache
        own = pool.acquire() if pool.free else None
        held = (lease.slot for lease in self.leases if lease.slot is not None)
        slot = min(held, key=pool.lengths.__getitem__) if own is None else own
        try:
            self._target.forward([Row.chain(slot, [0])]).wait()
        except FullError:  # sessions hold all pages: as healthy as when they got them
            pass
        finally:
            if own is not None:
                pool.release(own)

    # ---- drafts

    def _guesses(self, job: Job, worth: float) -> FlatTree | None:
        """The edge's guesses for a stream, if they are worth verifying."""
        if job.guesses is None or not isinstance(request := job.request, Stream):
            return None
        room = min(self._most_guesses, self._target.cache.capacity - job.base - 1)
        picked = job.guesses.pick(job.ids, room, worth, branches=self._target.capabilities.trees)
        if len(picked.tokens) == 1:
            return None
        ours = 0.0
        if request.speculate and not job.guesses.waits:
            ours = self.hint("drafting", lambda: self._drafting.matching(job)) or 0.0
        return picked[:2] if picked.expected >= ours else None

    def _drafts(
        self, jobs: Sequence[Job], guesses: Mapping[Job, FlatTree | None], beside: int
    ) -> dict[Job, FlatTree]:
        """The edge's drafts and guesses, and drafts of ours for the other streams; `beside` prompt
        tokens are in the forward."""
        made = {job: draft for job in jobs if (draft := guesses.get(job)) is not None}
        for job in jobs:
            if isinstance(request := job.request, Verify):
                made[job] = request.tokens, request.parents or range(-1, len(request.tokens) - 1)
        if streams := [job for job in jobs if job not in made]:
            beside += sum(len(tokens) for tokens, _ in made.values())
            ours = self.hint("drafting", lambda: self._drafting.draft(streams, beside))
            if ours is None or len(ours) != len(streams):
                ours = ServerDrafting().draft(streams)
            made |= zip(streams, ours, strict=True)
        for job, (tokens, _) in made.items():
            job.nodes = len(tokens)
        return made

    # ---- verdicts

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
        """Decide a round. `timing`: milliseconds that it waited and ran, and the sessions that
        shared the forward; `foreseen`: nodes of the draft that the edge had sent."""
        path, next_token, finish = cut_path(
            job.rules, job.ids, draft[0], accepted.path, accepted.next_token, self._decode
        )
        new = [*(draft[0][node] for node in path[1:]), next_token]
        logprobs = log_probabilities(step, b, path, new, job.logprobs) if job.logprobs >= 0 else b""
        self._commit(step, b, job.lease, path)
        of, round, base, (queue_ms, forward_ms, batch) = (
            job.lease.session,
            job.request.round,
            job.base,
            timing,
        )
        if isinstance(job.request, Verify):
            return Answered(
                job,
                Verdict(
                    of, round, base, path, next_token, finish, queue_ms, forward_ms, batch, logprobs
                ),
            )
        job.ids += new
        job.deadline = float("inf")  # it has begun
        done = bool(finish) or job.cancelled
        drafted = len(draft[0]) - 1
        answer = StreamTokens(
            of, round, base, new, done, finish, drafted, queue_ms, forward_ms, logprobs, foreseen
        )
        return Answered(job, answer)

    def _commit(self, step: Step, b: int, lease: Lease, path: Sequence[int]) -> None:
        committed: Any = self._target.commit(step, b, path)  # opaque here: drafters know its kind
        lease.length += len(path)
        self.hint("records", lambda: self._recorder.add(lease, committed))
        self.hint("drafting", lambda: self._drafting.committed(lease, committed))

    def _count(self, step: Step, jobs: Sequence[Job], seconds: float) -> None:
        self._metrics.forward_seconds.labels("draft" if jobs else "prompt").observe(seconds)
        self._metrics.prompt_tokens.inc(sum(step.sizes[len(jobs) :]))
        path, _, tier = step.path.partition(" ")
        self._metrics.forwards.labels(path, tier).inc()
        if jobs:
            self._metrics.batch_rows.observe(len(jobs))

    # ---- slots

    def _claim(self, lease: Lease, job: Job | None, outcome: StepOutcome) -> list[Report]:
        """Take a slot for the lease, which shares the prefix that another lease of the principal
        has run; returns what is to be reported where there is none."""
        source = lease.share
        tokens = lease.start
        pool = self._target.cache
        lease.share = None
        try:
            if source is not None and tokens:
                tokens *= bool(
                    self.hint("records", lambda: self._recorder.can_copy(source, lease, tokens))
                )
            if source is None or source.slot is None or not tokens:
                lease.slot = pool.acquire()
            else:
                lease.slot = pool.share(source.slot, tokens)
                self.hint("records", lambda: self._recorder.copy(source, lease, tokens))
                lease.length = tokens
                self.hint("drafting", lambda: self._drafting.shared(source, lease))
                self.hint("metrics", lambda: self._metrics.shared_tokens.inc(tokens))
        except Exception as error:
            return self._not_run(lease, job, error, outcome)
        self.leases[lease] = None
        lease.held = pool.pages_held[_slot(lease)]
        return []

    def _release(self, lease: Lease) -> None:
        for _ in range(2):  # else its slot is lost
            try:
                self.hint("records", lambda: self._recorder.forget(lease))
                self.hint("drafting", lambda: self._drafting.close(lease))
                self.leases.pop(lease, None)
                if lease.slot is not None:
                    lease.held = (
                        0  # before its pages are free: who counts both must not count them twice
                    )
                    self._target.cache.release(lease.slot)
                    lease.slot = None
                return
            except Exception as error:
                self.fault("release", error)

    # ---- trouble

    def _not_run(
        self, lease: Lease, job: Job | None, error: Exception, outcome: StepOutcome
    ) -> list[Report]:
        """Only this row did not run: the memory is full, or its work raised."""
        if isinstance(error, GrammarError) and job is not None:
            return [Dropped(job, Refusal(Code.GRAMMAR, str(error)))]
        if not isinstance(error, FullError):
            return [self.failed(lease, job, error)]
        if job is not None:
            return [self.no_memory(job)]
        outcome.full.append(lease)
        return []

    def _expired(self, job: Job) -> Report:
        if job.cancelled and isinstance(job.request, Stream):
            return Answered.ended(job)
        if job.cancelled:
            return Dropped(job, Refusal(Code.CANCELLED, "cancelled before it ran"))
        return Dropped(
            job, Refusal(Code.DEADLINE, f"not run within {self._clock() - job.enqueued:.2f} s")
        )

    def no_memory(self, job: Job) -> Report:
        """The model has no memory for a round now."""
        if isinstance(job.request, Stream) and job.base > job.request.base:
            return Answered.ended(job)  # it has begun: its tokens stay
        wait = int(1000 * _FULL_RETRY_SECONDS)
        message = "the target's key/value memory is full"
        return Dropped(job, Refusal(Code.BUSY, message, limit="kv_tokens", retry_after_ms=wait))

    def failed(self, lease: Lease, job: Job | None, error: Exception) -> Report:
        """The work of this session has raised: log it, and say so."""
        known = isinstance(
            error, NumericalError
        )  # the model's doing: where in our code it showed helps nobody
        log.error(
            "work of a session failed: %s",
            error,
            exc_info=None if known else error,
            extra={"session": lease.session, "event": "quarantine"},
        )
        self.hint("metrics", self._metrics.quarantined.inc)
        return Failed(lease, job, str(error) if known else type(error).__name__)

    def hint(self, where: str, do: Callable[[], Any]) -> Any:
        """Do what no token depends on; None where it raises."""
        try:
            return do()
        except Exception as error:
            self.fault(where, error)
            if where == "records":
                self._recorder.drop()
            return None

    def fault(self, where: str, error: Exception) -> None:
        """Count and log what has raised."""
        log.error(
            "%s failed: %s",
            where,
            error,
            exc_info=error,
            extra={"event": "engine_fault", "where": where},
        )
        with contextlib.suppress(Exception):
            self._metrics.engine_faults.labels(where).inc()


def _slot(lease: Lease) -> int:
    if lease.slot is None:
        raise RuntimeError("a row without a slot")
    return lease.slot


def _piece_row(piece: PrefillPiece) -> Row:
    start = piece.lease.length
    return Row.chain(
        _slot(piece.lease), piece.ids[start : min(piece.goal, start + piece.size)], judged="none"
    )
