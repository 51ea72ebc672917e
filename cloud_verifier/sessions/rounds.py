"""Rounds between session and model: admitted, queued, run in the engine's thread, and settled in the history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

from cloud_verifier.engine.scheduler import Scheduler
from cloud_verifier.engine.work import Dropped, Failed, Job, Lease, Recorded, Report, Settled, Spent, Streamed, Waiting
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.sessions.guesses import Guesses
from cloud_verifier.sessions.store import Session, SessionStore
from moa.wire.codes import Code, Refusal
from moa.wire.history import Timing
from moa.wire.limits import Limits
from moa.wire.messages import Foresee, Message, Stream, StreamTokens, Verdict, Verify


class Rounds:
    """Passes rounds to the engine and its reports to the sessions. Runs in the event loop."""

    def __init__(
        self,
        store: SessionStore,
        scheduler: Scheduler,
        metrics: Metrics,
        limits: Limits,
        clock: Callable[[], float],
        spend: Callable[[str, int], bool],
    ) -> None:
        """`spend` counts tokens that a principal has had run, and says whether it may go on."""
        self._store, self._scheduler, self._metrics = store, scheduler, metrics
        self._limits, self._clock, self._spend = limits, clock, spend
        self._draining = False

    # ---- to the engine

    def prepare(self, session: Session) -> None:
        """Ensure that the session has a slot, and that all but its pending token are queued to run."""
        self._store.ensure_lease(session)
        self._store.make_room(session, session.history.base)
        self.prepare_if_held(session)

    def prepare_if_held(self, session: Session) -> None:
        """Prefill the session's slot up to its log, if it has one."""
        if session.lease is not None:
            self._scheduler.prefill(session.lease, session.history.ids, session.history.base)

    def admit(self, session: Session, message: Verify | Stream) -> Verdict | StreamTokens | Literal["running"] | None:
        """The answer of a round that has settled, "running" when it is on the way, or None: submit it."""
        return session.history.admit(message)

    def submit(self, session: Session, message: Verify | Stream, arrived: float) -> None:
        """Queue an admitted round that arrived when the clock said so; a `Refusal` when there is no room."""
        self._store.check_growth(session, len(message.tokens) if isinstance(message, Verify) else 1)
        self._store.ensure_lease(session)
        if session.lease is None:
            raise Refusal(Code.INTERNAL, "no slot")
        ids = session.history.ids
        self._store.make_room(session, session.history.base + self._tokens(message))
        if isinstance(message, Stream) and session.guesses is None:
            session.guesses = Guesses(message.waits)
            if message.waits:
                self.prepare_if_held(session)
                return
        job = Job(
            lease=session.lease,
            request=message,
            ids=list(ids) if isinstance(message, Stream) else ids,
            rules=session.history.rules,
            sampling=session.sampling,
            enqueued=arrived,
            deadline=float("inf") if session.history.base > message.base else arrived + self._limits.request_seconds,
            logprobs=session.history.logprobs,
            guesses=session.guesses if isinstance(message, Stream) else None,
        )
        self._scheduler.submit(job)
        session.job = job

    def foresee(self, session: Session, message: Foresee, arrived: float) -> bool:
        """Add the edge's guesses for its running stream; guesses for another round are ignored. Whether they count as
        work."""
        if session.guesses is None or (running := session.history.running) is None or running.round != message.round:
            return False
        useful = session.guesses.add(message)
        if session.job is None:
            self._go_on(session, arrived)
        return useful

    def _tokens(self, message: Verify | Stream) -> int:
        """Tokens that the next forward of a round may write."""
        return len(message.tokens) if isinstance(message, Verify) else self._limits.max_tree_nodes

    def cancel(self, session: Session, round: int) -> None:
        """Ask that the round stop; its answer says where it did."""
        if session.job is not None and session.job.request.round == round:
            session.job.cancelled = True
        elif (running := session.history.running) is not None and running.round == round:
            self._end(session)

    def abandon(self, session: Session) -> None:
        """The connection is gone: a stream stops, a verify runs to its end (its verdict is needed on resume)."""
        if session.job is not None and isinstance(session.job.request, Stream):
            session.job.cancelled = True
        elif session.history.running is not None and session.job is None:
            self._end(session)

    def drain(self) -> None:
        """From now on no stream waits for guesses of its edge."""
        self._draining = True
        for session in self._store:
            if session.job is None and session.history.running is not None:
                self._end(session)

    # ---- from the engine

    def take(self, reports: list[Report]) -> None:
        """Handle the engine's reports. A report that raises costs only its own session."""
        for report in reports:
            lease = report.lease if isinstance(report, Recorded | Failed) else report.job.lease
            session = self._session(lease)
            if session is None:
                continue
            try:
                self._take_in(session, report)
            except Exception as error:
                log.exception("a report could not be taken in", extra={"session": session.id, "event": "quarantine"})
                self._metrics.quarantined.inc()
                job = None if isinstance(report, Recorded | Failed) else report.job
                self._take_in(session, Failed(lease, job, type(error).__name__))

    def _take_in(self, session: Session, report: Report) -> None:
        match report:
            case Settled():
                self._settled(session, report)
            case Streamed():
                self._streamed(session, report)
            case Waiting(job):
                session.job = None
                self._store.pass_on(session)
                if job.cancelled or self._draining:
                    self._end(session)
                elif session.guesses is not None and session.guesses.waiting:
                    self._go_on(session, self._clock())
            case Dropped():
                session.history.give_up()
                session.job = session.guesses = None
                self._refused(session, report.refusal, report.job.request.round)
            case Recorded():
                session.ready.add(report.start, report.stop)
                if session.owner is not None:
                    session.owner.offer(session)
            case Failed():
                round = report.job.request.round if report.job is not None else 0
                refusal = Refusal(Code.QUARANTINED, f"this session's work failed here ({report.reason}): open it again")
                self._refused(session, refusal, round)
                self._store.remove(session, "quarantined")

    def _settled(self, session: Session, report: Settled) -> None:
        verdict = session.history.settle(report.path, report.next_token, report.finish, report.timing, report.logprobs)
        session.job, session.used = None, self._clock()
        self._tell(session, verdict, Spent(report.job.enqueued, report.timing.forward_ms / 1000))
        request = report.job.request
        self._store.account(session)
        self._store.pass_on(session)
        drafted = len(request.tokens) - 1 if isinstance(request, Verify) else 0
        self._metrics.accepted(drafted, len(report.path) - 1, len(report.path), "verify")
        self._metrics.queue_seconds.observe(report.timing.queue_ms / 1000)

    def _streamed(self, session: Session, report: Streamed) -> None:
        message = session.history.emit(
            report.tokens,
            report.finish,
            report.timing,
            drafted=report.drafted,
            done=report.done,
            logprobs=report.logprobs,
            foreseen=report.foreseen,
        )
        session.used = self._clock()
        self._store.account(session)
        self._tell(session, message)
        if report.tokens and session.guesses is not None:
            session.guesses.advanced()
        paid = self._spend(session.principal, report.drafted + 1)
        if report.done:
            session.job = session.guesses = None
            self._store.pass_on(session)
        elif session.job is not None and (not paid or self._store.must_yield(session)):
            session.job.cancelled = True  # it ends with the tokens it has sent; the edge asks for the rest
        elif session.job is not None:
            with contextlib.suppress(Refusal):  # if there is no room the engine ends the stream
                self._store.make_room(session, session.history.base + self._tokens(session.job.request))
        if report.tokens:
            kind = "foreseen" if report.foreseen else "stream"
            self._metrics.accepted(report.drafted, len(report.tokens) - 1, len(report.tokens), kind)

    def _go_on(self, session: Session, arrived: float) -> None:
        """Run a stream that has waited; if there is no room it ends with the tokens it has sent."""
        running = session.history.running
        try:
            if isinstance(running, Stream):
                self.submit(session, running, arrived)
        except Refusal:
            self._end(session)

    def _end(self, session: Session) -> None:
        """End a stream that waits."""
        session.guesses = None
        self._tell(session, session.history.emit([], "", Timing(), drafted=0, done=True))

    def _refused(self, session: Session, refusal: Refusal, round: int) -> None:
        self._metrics.refusals.labels(refusal.code.value, refusal.limit).inc()
        log.info(
            "refused",
            extra={
                "session": session.id,
                "round": round,
                "principal": session.principal,
                "code": refusal.code.value,
                "limit": refusal.limit,
            },
        )
        self._tell(session, refusal.error(session=session.id, round=round))

    def _session(self, lease: Lease) -> Session | None:
        """The session that still holds this lease; what comes for an older one is void."""
        session = self._store.find(lease.session, lease.principal)
        return session if session is not None and session.lease is lease else None

    def _tell(self, session: Session, message: Message, spent: Spent | None = None) -> None:
        if session.owner is not None:
            session.owner.answer(message, spent)
