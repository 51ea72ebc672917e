"""What one step does with the model, in three parts, each of which returns what came of it:

    plan = runner.prepare(step)       slots are given back and taken; what is left to run
    ran = runner.run(plan)            drafts and pieces of prompts in one forward; what is accepted
    decided = runner.decide(ran)      rounds are cut, committed and answered

Rounds that cannot run are reported, and the others run. A plan that raises is run again row by row,
so that only the row that raises fails (`loop.py`). Drafts of ours, records and metrics only make
things faster: where they raise, no session fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from cloud_verifier.engine.contract import Answered, Dropped, Latency, Report, Waiting
from cloud_verifier.engine.draft import FlatTree, StreamDrafter
from cloud_verifier.engine.faults import Faults
from cloud_verifier.engine.holding import HeldSlots
from cloud_verifier.engine.job import Job, Lease
from cloud_verifier.engine.masks import MaskedRows, mask_rows
from cloud_verifier.engine.records import Recorder
from cloud_verifier.engine.schedule import EngineStep, PrefillPiece
from cloud_verifier.metrics import Metrics
from moa.errors import FullError
from moa.grammar.spec import GrammarError
from moa.target.choosing import Judged, accept_rows, log_probabilities
from moa.target.contract import Step, Target
from moa.target.rows import Row
from moa.tree import Accepted
from moa.wire.codes import Code, Refusal
from moa.wire.finish import Decode, cut_path
from moa.wire.messages import StreamTokens

_MASK_SECONDS = 0.01
"""For the masks of a batch: what has no mask by then is dropped from its draft, or the row waits
for the next batch."""
_FULL_RETRY_SECONDS = 0.25
"""When who found the memory full is told to come back."""


@dataclass(slots=True)
class Plan:
    """What is left of a step to run: rounds and pieces of prompts whose leases hold slots."""

    jobs: list[Job] = field(default_factory=list)
    pieces: list[PrefillPiece] = field(default_factory=list)
    guessed: dict[Job, FlatTree] = field(default_factory=dict)
    """Streams whose draft is the device's guesses."""
    between: float | None = None
    """Seconds since the forward before, where they are a part of these rounds: what lies between
    two forwards of a stream is. What lies between a forward and a request that arrives later is
    not; then nobody knows yet."""
    reports: list[Report] = field(default_factory=list)
    """Of what is not run."""
    full: list[Lease] = field(default_factory=list)
    """Prompts that found no memory."""

    @property
    def rows(self) -> int:
        """Of its forward."""
        return len(self.jobs) + len(self.pieces)

    def row_by_row(self) -> Iterator[Plan]:
        """Each row alone."""
        for job in self.jobs:
            guessed = {job: self.guessed[job]} if job in self.guessed else {}
            yield Plan(jobs=[job], guessed=guessed)
        for piece in self.pieces:
            yield Plan(pieces=[piece])


@dataclass(slots=True)
class Ran:
    """What one forward has brought."""

    plan: Plan
    started: float
    drafted: float
    """When its drafts were made, by the engine's clock."""
    ended: float
    drafts: Mapping[Job, FlatTree]
    step: Step
    accepted: Sequence[Accepted]
    """Of each of the plan's jobs."""
    late: Collection[Job] = ()
    """Rounds whose masks were not ready."""
    given_up: Mapping[Job, GrammarError] = field(default_factory=dict)
    """Rounds whose grammar is."""
    extra: float = 0.0
    """Seconds of drafts, and of masks where the forward was over sooner."""


@dataclass(slots=True)
class NotRun:
    """A forward that raised."""

    plan: Plan
    error: Exception


@dataclass(slots=True)
class Decided:
    """What a forward comes to."""

    reports: list[Report] = field(default_factory=list)
    again: list[Job] = field(default_factory=list)
    """Rounds that want their next forward: streams, and rounds whose masks were late."""
    full: list[Lease] = field(default_factory=list)
    """Prompts that found no memory."""
    won: dict[Job, int] = field(default_factory=dict)
    """Accepted nodes of the streams that were drafted for here."""


class StepRunner:
    """Runs steps, one after another. Only the model's thread uses it."""

    def __init__(
        self,
        target: Target,
        recorder: Recorder,
        drafting: StreamDrafter,
        slots: HeldSlots,
        *,
        decode: Decode | None,
        metrics: Metrics,
        faults: Faults,
        most_guesses: int,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._recorder = recorder
        self._drafting = drafting
        self._slots = slots
        self._decode = decode
        self._metrics = metrics
        self._faults = faults
        self._most_guesses = most_guesses
        self._clock = clock
        self._ended = clock()
        """When the latest forward ended, or this was made."""
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def close(self) -> None:
        """Run no more steps."""
        self._masks.shutdown()

    # ---- prepare

    def prepare(self, step: EngineStep) -> Plan:
        """Give slots back, pick guesses, and take the slots that are missing."""
        for lease in step.releases:
            self._slots.release(lease)
        plan = Plan(reports=[self._expired(job) for job in step.expired])
        if any(job.enqueued == self._ended for job in step.jobs):
            plan.between = self._clock() - self._ended
        for job in step.jobs:
            picked = self._pick_guesses(job, step.worth)
            if picked is not None:
                plan.guessed[job] = picked
            if picked is None and job.guesses.waits:
                plan.reports.append(Waiting(job))
            elif self._holds_slot(job.lease, job, plan):
                plan.jobs.append(job)
        for piece in step.prefill:
            holds = self._holds_slot(piece.lease, None, plan)
            if holds and piece.size and piece.lease.length < piece.goal:
                plan.pieces.append(piece)
        return plan

    def _pick_guesses(self, job: Job, worth: float) -> FlatTree | None:
        """The device's guesses for a stream, if they are worth verifying."""
        room = min(self._most_guesses, self._target.cache.capacity - job.base - 1)
        branches = self._target.capabilities.trees
        picked = job.guesses.pick(job.ids, room, worth, branches=branches)
        if len(picked.tokens) == 1:
            return None
        drafts_of_ours = 0.0
        if job.request.speculate and not job.guesses.waits:
            with self._faults.optional("drafting"):
                drafts_of_ours = self._drafting.matching(job)
        if not picked.expected >= drafts_of_ours:
            return None
        return picked.tokens, picked.parents

    def _holds_slot(self, lease: Lease, job: Job | None, plan: Plan) -> bool:
        """Whether it has a slot, which is taken now if need be."""
        if lease.slot is None and not lease.revoked:
            try:
                self._slots.claim(lease)
            except Exception as error:
                self._report_not_run(lease, job, error, plan)
        return lease.usable

    # ---- run

    def run(self, plan: Plan) -> Ran | NotRun:
        """Run what is planned in one forward: drafts, and beside them pieces of prompts."""
        try:
            started = self._clock()
            drafts = self._drafts(plan)
            drafted = self._clock()
            step, masked, masks_took_longer = self._forward(plan, drafts)
            self._count_pages(plan)
            accepted = accept_rows(step, masked.rows)
            if len(accepted) != len(plan.jobs):
                raise ValueError(f"{len(accepted)} rows of {len(plan.jobs)} were judged")
            step.wait()
        except Exception as error:
            return NotRun(plan, error)
        self._ended = self._clock()
        return Ran(
            plan=plan,
            started=started,
            drafted=drafted,
            ended=self._ended,
            drafts=drafts,
            step=step,
            accepted=accepted,
            late=masked.late,
            given_up=masked.failed,
            extra=drafted - started + masks_took_longer,
        )

    def _forward(
        self, plan: Plan, drafts: Mapping[Job, FlatTree]
    ) -> tuple[Step, MaskedRows, float]:
        """The forward, the rows as the accept rule takes them, and the seconds that the masks of
        grammars took longer."""
        masking = self._begin_masks(plan.jobs, drafts)
        try:
            step = self._target.forward(self._rows(plan, drafts))
            if masking is not None:
                step.wait()  # what the masks take longer is theirs
        finally:
            forward_ended = self._clock()
            if masking is not None:
                wait([masking])  # matchers are used again, whatever happens
            masks_took_longer = self._clock() - forward_ended
        if masking is not None:
            return step, masking.result(), masks_took_longer
        judged = [
            Judged(*drafts[job], job.ids, job.sampling, start=job.rules.start) for job in plan.jobs
        ]
        return step, MaskedRows(judged, late=set(), failed={}), masks_took_longer

    def _drafts(self, plan: Plan) -> dict[Job, FlatTree]:
        """The device's guesses, and drafts of ours for the other streams."""
        drafts = dict(plan.guessed)
        streams = [job for job in plan.jobs if job not in drafts]
        if streams:
            beside = sum(piece.size for piece in plan.pieces)
            beside += sum(len(tokens) for tokens, _ in drafts.values())
            drafts |= zip(streams, self._drafts_of_ours(streams, beside), strict=True)
        for job, (tokens, _) in drafts.items():
            job.cost = len(tokens)
        return drafts

    def _drafts_of_ours(self, streams: Sequence[Job], beside: int) -> list[FlatTree]:
        """Beside so many other tokens of the forward; where drafting raises, plain decoding."""
        ours: list[FlatTree] | None = None
        with self._faults.optional("drafting"):
            ours = self._drafting.draft(streams, beside)
        if ours is None or len(ours) != len(streams):
            return StreamDrafter().draft(streams)
        return ours

    def _begin_masks(
        self, jobs: Sequence[Job], drafts: Mapping[Job, FlatTree]
    ) -> Future[MaskedRows] | None:
        """Make the masks of grammars beside the forward; None where there is no grammar."""
        if all(job.matcher is None for job in jobs):
            return None
        until = time.perf_counter() + _MASK_SECONDS
        return self._masks.submit(mask_rows, jobs, [drafts[job] for job in jobs], until)

    @staticmethod
    def _rows(plan: Plan, drafts: Mapping[Job, FlatTree]) -> list[Row]:
        """Of the forward: drafts, then pieces of prompts."""
        rows = []
        for job in plan.jobs:
            tokens, parents = drafts[job]
            # Sampled rows ask for the logits of the nodes they reach; only greedy ones need the
            # best token of all.
            greedy = job.sampling.plain_greedy and job.matcher is None
            rows.append(Row(_slot(job.lease), tokens, parents, judged="all" if greedy else "read"))
        for piece in plan.pieces:
            start = piece.lease.length
            stop = min(piece.goal, start + piece.size)
            rows.append(Row.chain(_slot(piece.lease), piece.ids[start:stop], judged="none"))
        return rows

    def _count_pages(self, plan: Plan) -> None:
        """Note what the slots hold now: the event loop reserves the rest."""
        leases = [job.lease for job in plan.jobs] + [piece.lease for piece in plan.pieces]
        for lease in leases:
            lease.held = self._target.cache.pages_held[_slot(lease)]

    # ---- decide

    def decide(self, ran: Ran | NotRun) -> Decided:
        """Decide and commit the rounds of a forward; of one that raised, say whose it was."""
        decided = Decided()
        if isinstance(ran, NotRun):
            for job in ran.plan.jobs:
                self._report_not_run(job.lease, job, ran.error, decided)
            for piece in ran.plan.pieces:
                self._report_not_run(piece.lease, None, ran.error, decided)
            return decided
        for b, job in enumerate(ran.plan.jobs):
            if job in ran.late:
                decided.again.append(job)
                continue
            if job in ran.given_up:
                self._report_not_run(job.lease, job, ran.given_up[job], decided)
                continue
            try:
                decided.reports.append(self._answer(ran, b, job))
            except Exception as error:
                decided.reports.append(self._faults.failed(job.lease, job, error))
                continue
            if job not in ran.plan.guessed:
                decided.won[job] = len(ran.accepted[b].path) - 1
        return decided

    def _answer(self, ran: Ran, b: int, job: Job) -> Answered:
        """Decide one round: cut what is accepted where the answer ends, and commit it."""
        tokens, _ = ran.drafts[job]
        accepted = ran.accepted[b]
        path, next_token, finish = cut_path(
            job.rules, job.ids, tokens, accepted.path, accepted.next_token, self._decode
        )
        new = [*(tokens[node] for node in path[1:]), next_token]
        logprobs = b""
        if job.logprobs >= 0:
            logprobs = log_probabilities(ran.step, b, path, new, job.logprobs)
        self._commit(ran.step, b, job.lease, path)
        base = job.base
        job.ids += new
        job.deadline = float("inf")  # it has begun
        stream_tokens = StreamTokens(
            session=job.lease.session,
            round=job.request.round,
            base=base,
            tokens=new,
            done=bool(finish) or job.cancelled,
            finish=finish,
            drafted=len(tokens) - 1,
            # Drafts of ours are no part of a forward, by whose time the edge judges what its own
            # guesses would cost.
            queue_ms=1000 * (ran.drafted - job.enqueued),
            forward_ms=1000 * (ran.ended - ran.drafted),
            logprobs=logprobs,
            foreseen=len(tokens) - 1 if job in ran.plan.guessed else 0,
        )
        latency = Latency(arrived=job.enqueued, forward=ran.ended - ran.started)
        return Answered(job, stream_tokens, latency)

    def _commit(self, step: Step, b: int, lease: Lease, path: Sequence[int]) -> None:
        committed: Any = self._target.commit(step, b, path)  # opaque here: drafters know its kind
        lease.length += len(path)
        with self._faults.optional("records"):
            self._recorder.add(lease, committed)
        with self._faults.optional("drafting"):
            self._drafting.committed(lease, committed)

    # ---- what can wait until the answers are sent

    def conclude(self, ran: Ran, decided: Decided) -> list[Report]:
        """Commit the pieces of prompts, and learn what the forward took; streams that go on are to
        run again. Returns what is to be reported of prompts."""
        reports: list[Report] = []
        for b, piece in enumerate(ran.plan.pieces, len(ran.plan.jobs)):
            try:
                self._commit(ran.step, b, piece.lease, range(ran.step.sizes[b]))
            except Exception as error:
                reports.append(self._faults.failed(piece.lease, None, error))
        with self._faults.optional("metrics"):
            self._count_forward(ran)
        seconds = ran.ended - ran.drafted
        between = ran.plan.between
        followed_by = self._clock() - ran.ended if between is None else between
        with self._faults.optional("drafting"):
            self._drafting.ran(decided.won, sum(ran.step.sizes), seconds + followed_by)
        for report in decided.reports:
            match report:
                case Answered(job, StreamTokens(done=False) as answer):
                    job.enqueued = ran.ended
                    job.sent(len(answer.tokens), ran.ended)
                    decided.again.append(job)
        return reports

    def _count_forward(self, ran: Ran) -> None:
        kind = "draft" if ran.plan.jobs else "prompt"
        self._metrics.forward_seconds.labels(kind).observe(ran.ended - ran.drafted)
        self._metrics.prompt_tokens.inc(sum(ran.step.sizes[len(ran.plan.jobs) :]))
        path, _, tier = ran.step.path.partition(" ")
        self._metrics.forwards.labels(path, tier).inc()
        if ran.plan.jobs:
            self._metrics.batch_rows.observe(len(ran.plan.jobs))

    # ---- what is said of work that did not run

    def _report_not_run(
        self, lease: Lease, job: Job | None, error: Exception, into: Plan | Decided
    ) -> None:
        """Only this row did not run: the memory is full, or its work raised."""
        if isinstance(error, GrammarError) and job is not None:
            into.reports.append(Dropped(job, Refusal(Code.GRAMMAR, str(error))))
        elif not isinstance(error, FullError):
            into.reports.append(self._faults.failed(lease, job, error))
        elif job is not None:
            into.reports.append(self.no_memory(job))
        else:
            into.full.append(lease)

    def _expired(self, job: Job) -> Report:
        if job.cancelled:
            return Answered.ended(job)
        waited = self._clock() - job.enqueued
        return Dropped(job, Refusal(Code.DEADLINE, f"not run within {waited:.2f} s"))

    def no_memory(self, job: Job) -> Report:
        """The model has no memory for a round now."""
        if job.base > job.request.base:
            return Answered.ended(job)  # it has begun: its tokens stay
        refusal = Refusal(
            Code.BUSY,
            "the target's key/value memory is full",
            limit="kv_tokens",
            retry_after_ms=int(1000 * _FULL_RETRY_SECONDS),
        )
        return Dropped(job, refusal)


def _slot(lease: Lease) -> int:
    if lease.slot is None:
        raise RuntimeError("a row without a slot")
    return lease.slot
