"""What one step does with the model, in three parts, each of which returns its result:

    plan = runner.prepare(step)       slots are given back and taken; what is left to run
    ran = runner.run(plan)            drafts and pieces of prompts in one forward; what is accepted
    decided = runner.decide(ran)      rounds are cut, committed and answered

Rounds that cannot run are reported, and the others run. A plan that raises is run again row by row,
so that only the row that raises fails (`loop.py`). Drafts of ours, records and metrics only make
things faster: where they raise, no session fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from cloud_verifier.engine.contract import Answered, Dropped, Latency, Report, Waiting
from cloud_verifier.engine.draft import FlatTree, StreamDrafter, check_draft
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
"""Time for the masks of a batch. A node without a mask by then is dropped from its draft; a row
whose pending token has none waits for the next batch."""
_FULL_RETRY_SECONDS = 0.25
"""After so long a device that found the memory full is told to come back."""


@dataclass(slots=True)
class Plan:
    """What is left of a step to run: rounds and pieces of prompts whose leases hold slots."""

    jobs: list[Job] = field(default_factory=list)
    pieces: list[PrefillPiece] = field(default_factory=list)
    guessed: dict[Job, FlatTree] = field(default_factory=dict)
    """The drafts of the streams whose draft is made of the device's guesses."""
    between: float | None = None
    """Seconds between the forward before and this one, where they are a part of these rounds: what
    lies between two forwards of a stream is. None where they are not: what lies between a forward
    and a request that arrives later is nobody's round."""
    reports: list[Report] = field(default_factory=list)
    """What the event loop is told of rounds that are not run."""
    full: list[Lease] = field(default_factory=list)
    """Leases whose prompts found no memory."""

    @property
    def rows(self) -> int:
        """The number of rows of its forward."""
        return len(self.jobs) + len(self.pieces)

    def left_out_of(self, step: EngineStep) -> set[Lease]:
        """Returns the leases of the step of which nothing is run."""
        planned = {job.lease for job in step.jobs} | {piece.lease for piece in step.prefill}
        running = {job.lease for job in self.jobs} | {piece.lease for piece in self.pieces}
        return planned - running

    def row_by_row(self) -> Iterator[Plan]:
        """Plans of one row each, which together run the same rows."""
        for job in self.jobs:
            guessed = {job: self.guessed[job]} if job in self.guessed else {}
            yield Plan(jobs=[job], guessed=guessed)
        for piece in self.pieces:
            yield Plan(pieces=[piece])


@dataclass(slots=True)
class Ran:
    """The result of one forward. Times are by the engine's clock."""

    plan: Plan
    started: float
    """When its drafts were begun."""
    drafted: float
    """When its drafts were made, and the forward began."""
    ended: float
    """When the forward's results were there."""
    drafts: Mapping[Job, FlatTree]
    step: Step
    accepted: Sequence[Accepted]
    """What the target accepts of each draft, in the order of the plan's jobs."""
    late: Collection[Job] = ()
    """Rounds whose masks were not ready in time: nothing is accepted for them."""
    given_up: Mapping[Job, GrammarError] = field(default_factory=dict)
    """Rounds whose grammar turned out to be too expensive, or wrong."""
    extra_seconds: float = 0.0
    """Seconds of drafts, and of masks where the forward was over sooner."""


@dataclass(slots=True)
class NotRun:
    """The result of a forward that raised."""

    plan: Plan
    error: Exception


@dataclass(slots=True)
class Decided:
    """What becomes of the rounds of one forward."""

    reports: list[Report] = field(default_factory=list)
    run_again: list[Job] = field(default_factory=list)
    """Rounds that want their next forward: streams, and rounds whose masks were late."""
    full: list[Lease] = field(default_factory=list)
    """Leases whose prompts found no memory."""
    accepted_nodes: dict[Job, int] = field(default_factory=dict)
    """For each stream that was drafted for here: how many nodes of the draft were accepted."""


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
        """Run steps of `target`. `decode` turns tokens into text, to look for stop strings;
        `most_guesses` is how many guesses of a device may be verified at once."""
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
        """The thread that makes grammar masks beside a forward."""

    def close(self) -> None:
        """Run no more steps."""
        self._masks.shutdown()

    # ---- prepare

    def prepare(self, step: EngineStep) -> Plan:
        """Returns what can be run of this step. Slots are given back, and the missing ones taken;
        the device's guesses become the draft of a stream where they promise more than a draft of
        ours."""
        for lease in step.heirs:
            # Without room for both at once it takes an empty slot later, and runs all of its tokens.
            with self._faults.optional("sharing"), contextlib.suppress(FullError):
                if not lease.revoked:
                    self._slots.claim(lease)
        for lease in step.releases:
            self._slots.release(lease)
        plan = Plan(reports=[self._expired(job) for job in step.expired])
        # A stream that goes on is queued again at the very moment at which its forward has ended.
        if any(job.enqueued == self._ended for job in step.jobs):
            plan.between = self._clock() - self._ended
        for job in step.jobs:
            room = min(self._most_guesses, self._target.cache.capacity - job.base - 1)
            branches = self._target.capabilities.trees
            picked = job.guesses.pick(job.ids, room, step.least_chance, branches=branches)
            has_guesses = len(picked.tokens) > 1  # beside the pending token
            if has_guesses and picked.expected >= self._worth_of_our_drafts(job):
                plan.guessed[job] = (picked.tokens, picked.parents)
            elif job.guesses.waits:
                plan.reports.append(Waiting(job))  # its device drafts, and has sent nothing yet
                continue
            if self._holds_slot(job.lease, job, plan):
                plan.jobs.append(job)
        self._prepare_prompts(step.prefill, plan)
        return plan

    def _prepare_prompts(self, pieces: Iterable[PrefillPiece], plan: Plan) -> None:
        """Add those of these pieces of prompts to the plan that have a slot, and tokens to run."""
        for piece in pieces:
            holds_slot = self._holds_slot(piece.lease, None, plan)
            # A prompt that is shared whole has nothing to run.
            if holds_slot and piece.size and piece.lease.length < piece.goal:
                plan.pieces.append(piece)

    def _worth_of_our_drafts(self, job: Job) -> float:
        """The accepted nodes that guesses must promise, to be verified in place of a draft of
        ours; 0 where we make none."""
        worth = 0.0
        if job.request.speculate and not job.guesses.waits:
            with self._faults.optional("drafting"):
                worth = self._drafting.matching(job)
        return worth

    def _holds_slot(self, lease: Lease, job: Job | None, plan: Plan) -> bool:
        """Whether the lease has a slot, the place of a session's KV cache. One is taken now if need
        be; if that raises, the plan gets a report of it."""
        if lease.slot is None and not lease.revoked:
            try:
                self._slots.claim(lease)
            except Exception as error:
                self._report_not_run(lease, job, error, plan)
        return lease.usable

    # ---- run

    def run(self, plan: Plan) -> Ran | NotRun:
        """Make the missing drafts, run all rows of the plan in one forward, and see what the target
        accepts of each draft. What raises is returned: the caller runs the rows again one by
        one."""
        try:
            started = self._clock()
            drafts = plan.guessed | self._drafts_of_ours(plan)
            drafted = self._clock()
            rows: list[Row] = []  # one for each sequence: first the rounds, then pieces of prompts
            to_judge: list[Judged] = []
            for job in plan.jobs:
                tokens, parents = drafts[job]
                job.cost = len(tokens)  # what its next forward will take, about
                # Sampled rows ask for the logits of the nodes they reach; only greedy ones need the
                # best token of all.
                greedy = job.sampling.plain_greedy and job.matcher is None
                rows.append(
                    Row(_slot(job.lease), tokens, parents, judged="all" if greedy else "read")
                )
                to_judge.append(
                    Judged(tokens, parents, job.ids, job.sampling, start=job.rules.start)
                )
            rows += [_row_of_prompt(piece) for piece in plan.pieces]
            masking = self._begin_masks(plan.jobs, to_judge)
            try:
                step = self._target.forward(rows)
                if masking is not None:
                    step.wait()  # so that what the masks take longer is known
            finally:
                masks_took_longer = self._wait_for_masks(masking)
            masked = masking.result() if masking is not None else MaskedRows(to_judge)
            self._note_pages(plan)
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
            extra_seconds=drafted - started + masks_took_longer,
        )

    def _drafts_of_ours(self, plan: Plan) -> dict[Job, FlatTree]:
        """Returns drafts by the server's drafter for the rounds that are not drafted of the device's
        guesses. If drafting raises, or returns what is no draft of these texts, each has only its
        pending token: plain decoding."""
        streams = [job for job in plan.jobs if job not in plan.guessed]
        if not streams:
            return {}
        # Other tokens in the forward.
        beside = sum(piece.size for piece in plan.pieces)
        beside += sum(len(tokens) for tokens, _ in plan.guessed.values())
        with self._faults.optional("drafting"):
            drafts = self._drafting.draft(streams, beside)
            vocabulary = self._target.facts.vocab_size
            for job, draft in zip(streams, drafts, strict=True):
                room = self._target.cache.capacity - job.base - 1
                check_draft(draft, pending=job.ids[-1], vocabulary=vocabulary, room=room)
            return dict(zip(streams, drafts, strict=True))
        return dict(zip(streams, StreamDrafter().draft(streams), strict=True))

    def _begin_masks(
        self, jobs: Sequence[Job], rows: Sequence[Judged]
    ) -> Future[MaskedRows] | None:
        """Begin to make the masks of grammars for these rows in a thread, beside the forward; None
        where no round has a grammar."""
        if all(job.matcher is None for job in jobs):
            return None
        until = time.perf_counter() + _MASK_SECONDS
        return self._masks.submit(mask_rows, jobs, rows, until)

    def _wait_for_masks(self, masking: Future[MaskedRows] | None) -> float:
        """Wait until the masks are made, also where the forward has raised: the next masks need the
        same matchers. Returns the seconds that this took."""
        if masking is None:
            return 0.0
        began = self._clock()
        wait([masking])
        return self._clock() - began

    def _note_pages(self, plan: Plan) -> None:
        """Note how many pages the slots hold now: the event loop reserves what they may need beside
        these."""
        leases = [job.lease for job in plan.jobs] + [piece.lease for piece in plan.pieces]
        for lease in leases:
            lease.pages_held = self._target.cache.pages_held[_slot(lease)]

    # ---- decide

    def decide(self, ran: Ran | NotRun) -> Decided:
        """Decide what is accepted of each round of a forward, and commit it. If the forward raised,
        its rounds and prompts are reported as not run."""
        if isinstance(ran, NotRun):
            return self._decide_not_run(ran)
        decided = Decided()
        for row, job in enumerate(ran.plan.jobs):
            if job in ran.late:
                decided.run_again.append(job)
                continue
            if job in ran.given_up:
                self._report_not_run(job.lease, job, ran.given_up[job], decided)
                continue
            try:
                decided.reports.append(self._answer(ran, row, job))
            except Exception as error:
                decided.reports.append(self._faults.failed(job.lease, job, error))
                continue
            if job not in ran.plan.guessed:
                # The path's first node is the pending token, which nobody has drafted.
                decided.accepted_nodes[job] = len(ran.accepted[row].path) - 1
        return decided

    def _decide_not_run(self, not_run: NotRun) -> Decided:
        """Report all rounds and prompts of a forward that raised as not run."""
        decided = Decided()
        for job in not_run.plan.jobs:
            self._report_not_run(job.lease, job, not_run.error, decided)
        for piece in not_run.plan.pieces:
            self._report_not_run(piece.lease, None, not_run.error, decided)
        return decided

    def _answer(self, ran: Ran, row: int, job: Job) -> Answered:
        """Decide the round in this row of the forward: cut the accepted path where the answer ends,
        keep its keys and values, and return its tokens for the device. The last token is the
        target's own choice after the path."""
        tokens, _ = ran.drafts[job]
        accepted = ran.accepted[row]
        path, next_token, finish = cut_path(
            job.rules, job.ids, tokens, accepted.path, accepted.next_token, self._decode
        )
        new = [*(tokens[node] for node in path[1:]), next_token]
        logprobs = b""
        if job.logprobs >= 0:
            logprobs = log_probabilities(ran.step, row, path, new, job.logprobs)
        self._commit(ran.step, row, job.lease, path)
        base = job.base
        job.ids += new
        job.deadline = float("inf")  # deadlines are for rounds that have not begun
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

    def _commit(self, step: Step, row: int, lease: Lease, path: Sequence[int]) -> None:
        """Keep the keys and values of this path of a row in the lease's slot, and hand its states
        to whoever makes records or drafts of them."""
        committed: Any = self._target.commit(step, row, path)  # drafters know its kind
        lease.length += len(path)
        with self._faults.optional("records"):
            self._recorder.add(lease, committed)
        with self._faults.optional("drafting"):
            self._drafting.committed(lease, committed)

    # ---- conclude

    def conclude(self, ran: Ran, decided: Decided) -> list[Report]:
        """Do what can wait until the answers are sent: commit the pieces of prompts, learn from the
        forward's time, and let streams that have not ended run again. Returns reports of prompts
        that failed."""
        reports = self._commit_prompts(ran)
        with self._faults.optional("metrics"):
            self._count_forward(ran)
        seconds = ran.ended - ran.drafted
        between = ran.plan.between
        # The time of a round is from one forward of a stream to the next. Where that is not known,
        # the time since the forward stands for what lies between the two.
        followed_by = self._clock() - ran.ended if between is None else between
        with self._faults.optional("drafting"):
            self._drafting.ran(decided.accepted_nodes, sum(ran.step.sizes), seconds + followed_by)
        for report in decided.reports:
            match report:
                case Answered(job, StreamTokens(done=False) as answer):
                    job.enqueued = ran.ended
                    job.sent(len(answer.tokens), ran.ended)
                    decided.run_again.append(job)
        return reports

    def _commit_prompts(self, ran: Ran) -> list[Report]:
        """Keep the keys and values of the pieces of prompts in their slots; returns reports of those
        that failed."""
        reports: list[Report] = []
        # The rows of prompts come behind those of rounds.
        for row, piece in enumerate(ran.plan.pieces, len(ran.plan.jobs)):
            try:
                self._commit(ran.step, row, piece.lease, range(ran.step.sizes[row]))
            except Exception as error:
                reports.append(self._faults.failed(piece.lease, None, error))
        return reports

    def _count_forward(self, ran: Ran) -> None:
        """Count a forward in the metrics."""
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
        """Report why this row, which ran or would have run alone, has no result: its grammar is
        refused, the memory is full, or it raised. A prompt without a round has nobody to tell: it
        is noted as full."""
        if isinstance(error, GrammarError) and job is not None:
            into.reports.append(Dropped(job, Refusal(Code.GRAMMAR, str(error))))
        elif not isinstance(error, FullError):
            into.reports.append(self._faults.failed(lease, job, error))
        elif job is not None:
            into.reports.append(self.no_memory(job))
        else:
            into.full.append(lease)

    def _expired(self, job: Job) -> Report:
        """The report of a round that the scheduler has taken out because it was cancelled or too
        late."""
        if job.cancelled:
            return Answered.ended(job)
        waited = self._clock() - job.enqueued
        return Dropped(job, Refusal(Code.DEADLINE, f"not run within {waited:.2f} s"))

    def no_memory(self, job: Job) -> Report:
        """Returns the report of a round for which the model has no memory now: an answer that has
        begun ends where it is, another one is refused for a moment."""
        has_begun = job.base > job.request.base
        if has_begun:
            return Answered.ended(job)  # its tokens stay
        refusal = Refusal(
            Code.BUSY,
            "the target's key/value memory is full",
            limit="kv_tokens",
            retry_after_ms=int(1000 * _FULL_RETRY_SECONDS),
        )
        return Dropped(job, refusal)


def _row_of_prompt(piece: PrefillPiece) -> Row:
    """The row of a forward that runs a piece of a prompt."""
    start = piece.lease.length
    stop = min(piece.goal, start + piece.size)
    return Row.chain(_slot(piece.lease), piece.ids[start:stop], judged="none")


def _slot(lease: Lease) -> int:
    """The slot of a lease that is planned to run, and so must have one."""
    if lease.slot is None:
        raise RuntimeError("a row without a slot")
    return lease.slot
