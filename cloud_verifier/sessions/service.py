"""All connections and sessions of one process: common limits, rates and drain, and the way between
a session and the engine. No sockets."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from cloud_verifier.engine.contract import (
    Answered,
    Dropped,
    EngineWork,
    Failed,
    ModelFacts,
    Recorded,
    Report,
    Waiting,
)
from cloud_verifier.engine.job import Job
from cloud_verifier.logs import log
from cloud_verifier.metrics import Metrics
from cloud_verifier.sessions.budgets import Principal
from cloud_verifier.sessions.outbox import CloseConnection, Outbox
from cloud_verifier.sessions.session import PREFILL, Output, Prefill, Run, ServerSession
from cloud_verifier.sessions.table import SessionTable
from moa.api.access import ANONYMOUS
from moa.errors import MoaError, UsageError
from moa.grammar.matcher import GrammarCompiler, Matcher
from moa.grammar.spec import Grammar
from moa.wire.codes import CloseCode, Code, Refusal
from moa.wire.limits import Limits
from moa.wire.messages import Behind, Error, Goaway, Open, StreamTokens

_SERVED_SECONDS = 1.0
"""Whose session did something so lately is being served now."""
_CONNECTION_RETRY_MS = 1000
"""Who is refused another connection is asked to wait for so long."""
_FOR_NOW = frozenset({Code.BUSY, Code.DEADLINE})
"""Refusals for now: answers of this process itself wait, and ask again."""


class Service:
    """All connections and sessions of a process."""

    def __init__(
        self,
        facts: ModelFacts,
        limits: Limits,
        work: EngineWork,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        free_pages: Callable[[], int] = lambda: 0,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Make the service of a model, of which `facts` says what it can do. `work` runs the
        sessions' rounds, `free_pages` returns how many pages of KV cache nobody holds, and
        `grammars` compiles what answers must match."""
        self.facts = facts
        self.limits = limits
        self.clock = clock
        self.metrics = metrics or Metrics()
        self.work = work
        self.free_pages = free_pages
        self._grammars = grammars
        self.table = SessionTable(
            limits,
            facts,
            clock=clock,
            release=work.release,
            evicted=lambda reason: self.metrics.evictions.labels(reason).inc(),
            free_pages=free_pages,
        )
        self.connections: dict[Outbox, str] = {}
        """Each connection's principal."""
        self._behind = Behind()
        """What stands behind this process, if anything does."""
        self._told_what_is_behind: set[Outbox] = set()
        """Connections whose devices want to know that."""
        self.instance = secrets.token_hex(8)
        """Tells devices whether this is the process that they knew."""
        self.draining = False
        """Whether new work is refused, because the process is about to end."""
        self.max_connections = limits.max_connections
        """Lower than the limit if the process may not open so many files."""
        self._principals: dict[str, Principal] = {}
        """By name."""
        self._gone: set[Job] = set()
        """Rounds that the engine did not hold when `sweep` was last called, and of which nothing
        had been reported."""
        self.max_context = limits.context_within(facts.capacity)

    def drain(self, reason: str, seconds: float) -> None:
        """Accept no new work; send Goaway to every client."""
        self.draining = True
        for session in self.table:
            self.perform(session, session.stop_waiting(for_good=True))
        for outbox in self.connections:
            outbox.answer(Goaway(reason=reason, drain_ms=int(1000 * seconds)))

    @property
    def idle(self) -> bool:
        """Whether no round runs, nothing waits to be sent, and no answer of this process is under
        way: that may wait between two rounds, for its principal's rate."""
        running = any(session.running is not None for session in self.table)
        busy = any(outbox.has_answers or outbox.is_local for outbox in self.connections)
        return not running and not busy

    # ---- connections

    def principal(self, name: str) -> Principal:
        """Returns the budgets that all connections of a principal, the owner of an access token,
        share."""
        found = self._principals.get(name)
        if found is None:
            found = self._principals[name] = Principal.of(self.limits, self.clock())
        return found

    def others(self, principal: str) -> bool:
        """Whether anybody else is served now."""
        since = self.clock() - _SERVED_SECONDS
        return any(
            session.principal != principal and session.used > since for session in self.table
        )

    def no_room(self, name: str) -> Refusal | None:
        """The refusal of another connection of this principal, where the process or the principal
        has as many as it may; None if there is room."""
        whose, limit = "", ""
        if len(self.connections) >= self.max_connections:
            limit = "max_connections"
        elif self.principal(name).connections >= self.limits.max_connections_per_principal:
            limit = "max_connections_per_principal"
            if name != ANONYMOUS:  # without a token file nobody has a key
                whose = " of your key"
        if not limit:
            return None
        words = f"too many connections{whose}"
        return Refusal(Code.BUSY, words, limit=limit, retry_after_ms=_CONNECTION_RETRY_MS)

    def refuse_another(self, name: str, peer: str) -> str:
        """Why there is no room for another connection of this principal, in words with the limit's
        name; empty if there is. That is counted and logged."""
        refusal = self.no_room(name)
        if refusal is None:
            return ""
        self.count_refusal(refusal.error(), name, peer)
        return f"{refusal} ({refusal.limit})"

    def end_sessions_but_of(self, stays: Callable[[str], bool]) -> None:
        """End the sessions of all principals that do not stay, also those without a connection:
        nobody can come back for them, and they would keep text, and slots, for an hour."""
        for session in list(self.table):
            if not stays(session.principal):
                self.table.remove(session, "revoked")

    def join(self, outbox: Outbox, principal: str) -> None:
        """Add a connection."""
        self.principal(principal).connections += 1
        self.connections[outbox] = principal

    def leave(self, outbox: Outbox) -> None:
        """Remove a connection that is gone. Its sessions wait for the device to return, and their
        rounds end."""
        principal = self.connections.pop(outbox, None)
        self._told_what_is_behind.discard(outbox)
        if principal is None:
            return
        self.principal(principal).connections -= 1
        found = [self.table.find(id, principal) for id in list(outbox.sessions)]
        sessions = [session for session in found if session is not None]
        for session in sessions:
            session.detach()
            session.used = self.clock()
        # Only when all are detached: what is said from now on is said to nobody.
        for session in sessions:
            self.perform(session, session.abandon())

    def tell_what_is_behind(self, outbox: Outbox) -> None:
        """Tell this connection's device which engine stands behind this process and whether it
        answers: now, and whenever that changes."""
        self._told_what_is_behind.add(outbox)
        outbox.answer(self._behind)

    def behind(self, model: str, away: str) -> None:
        """Tell devices that the engine behind has this model, and does not answer for this reason;
        with an empty one it answers."""
        if self._behind == Behind(model, away):
            return
        self._behind = Behind(model, away)
        for outbox in self._told_what_is_behind:
            outbox.answer(self._behind)

    # ---- from a connection to the engine

    def check_goes_on(self) -> None:
        """Raise the `Refusal` of new work if this process is about to stop."""
        if self.draining:
            raise Refusal(Code.DRAINING, "this verifier is stopping", retry_after_ms=0)

    def admit(self, principal: str, tokens: int, *, is_begun: bool = False) -> None:
        """Count tokens of new work against the principal's rate; a `Refusal` if that is used up, or
        if this process is about to stop and the work is no part of what `is_begun`."""
        if not is_begun:
            self.check_goes_on()
        budget = self.principal(principal).tokens
        now = self.clock()
        if (wait := budget.wait(tokens, now)) > 0:
            raise _above_rate(principal, wait)
        budget.spend(tokens)

    @contextlib.contextmanager
    def admitted(self, principal: str, tokens: int) -> Iterator[None]:
        """Admit new work. If it is refused after all, as for want of a slot, its tokens cost
        nothing: else each time that it is asked for again would."""
        self.admit(principal, tokens)
        try:
            yield
        except BaseException:
            self.principal(principal).tokens.spend(-tokens)
            raise

    def most_guesses(self, principal: str) -> float:
        """How many guesses of this principal's devices may be run in a forward now."""
        return self.principal(principal).most_guesses(self.clock())

    def prepare_grammars(self) -> None:
        """Begin with what the first grammar needs, beside other work."""
        if self._grammars is not None:
            self._grammars.prepare()

    async def matcher(
        self, principal: str, grammar: Grammar, start: int, log: Sequence[int]
    ) -> Matcher:
        """Compile a grammar into what follows an answer that begins at position `start`, behind
        what the log has of that answer already. A `Refusal` says what is wrong with the grammar."""
        if self._grammars is None:
            raise Refusal(Code.UNSUPPORTED, "there is no tokenizer here to follow a grammar with")
        try:
            async with self.principal(principal).compiling:  # one after another
                return await self._grammars.matcher(grammar, start, log)
        except UsageError as error:
            raise Refusal(Code.GRAMMAR, error.line()) from None
        except MoaError as error:  # this process could start no other one
            raise Refusal(Code.BUSY, error.line(), retry_after_ms=1000) from None

    def open(
        self,
        message: Open,
        principal: str,
        features: Collection[str],
        matcher: Matcher | None = None,
    ) -> ServerSession:
        """Make a new session and have its prompt run; raises a `Refusal` if the prompt is too long
        or there is no room."""
        tokens = len(message.ids)
        if tokens >= self.max_context:
            raise Refusal(
                Code.LIMIT,
                f"{tokens} prompt tokens leave no room in a context of {self.max_context}",
                limit="max_context_tokens",
            )
        session = ServerSession(
            message,
            self.limits,
            eos_ids=frozenset(self.facts.eos_ids),
            max_context=self.max_context,
            principal=principal,
            features=features,
            now=self.clock(),
            matcher=matcher,
        )
        self.table.check_room(session)
        # A rate is of tokens that are run: a session that takes the place of another one, which
        # nobody can go on with, pays for no more than a next turn there would. What an engine behind
        # keeps in memory is not known.
        shared = 0 if self.facts.has_engine_behind else self.table.run_before(session)
        with self.admitted(principal, tokens - shared):
            try:
                self.perform(session, [PREFILL])
                self.table.add(session)
            except BaseException:
                self.table.remove(session, "refused")
                raise
        return session

    def perform(self, session: ServerSession, outputs: Iterable[Output]) -> None:
        """Do what a session's method has returned: send messages to its device, and give work to
        the engine. Raises a `Refusal` if there is no room for the work."""
        for output in outputs:
            match output:
                case Prefill():
                    lease = self.table.reserve(session)
                    self.work.prefill(lease, session.log, session.base)
                case Run(arrived):
                    job = session.as_job(self.table.reserve(session), arrived)
                    self.work.submit(job)
                    session.job = job
                case _:
                    if session.outbox is not None:
                        session.outbox.answer(output)
        self.table.account(session)

    def prepare(self, session: ServerSession, outputs: Iterable[Output]) -> None:
        """Do what a session's method has returned, where no round waits for it yet: if there is no
        room, the next round asks for it again."""
        try:
            self.perform(session, outputs)
        except Refusal as refusal:
            log.info("no slot yet", extra={"session": session.id, "limit": refusal.limit})

    def go_on(self, session: ServerSession, outputs: Iterable[Output]) -> None:
        """Perform the outputs of a stream that has waited: when there is no room, it ends with the
        tokens that it has sent."""
        try:
            self.perform(session, outputs)
        except Refusal:
            self.perform(session, session.stop_waiting())

    def sweep(self) -> None:
        """Apply the timeouts of sessions, and end sessions whose round the engine has lost. A round
        counts as lost if it was missing at the call before, too: so no report of it is on its
        way."""
        self.table.sweep()
        gone: dict[Job, ServerSession] = {}
        for session in self.table:
            if session.job is not None and not self.work.holds(session.job):
                gone[session.job] = session
        for job, session in gone.items():
            if job in self._gone and session.lease is not None:
                log.error("a round was lost", extra={"session": session.id, "event": "quarantine"})
                self.metrics.quarantined.inc()
                self._quarantine(session, Failed(session.lease, job, "lost"))
        self._gone = set(gone)

    def tell_progress(self, read_for: Callable[[Job], int | None]) -> None:
        """Tell devices that have heard nothing for long how far their rounds are. `read_for` returns
        how many tokens are read for a round, None if nothing is being done for it. A device that
        does not read its answers is told nothing."""
        now = self.clock()
        for session in self.table:
            outbox = session.outbox
            if outbox is None or outbox.has_answers:
                continue
            read = None if session.job is None else read_for(session.job)
            if read is None:
                continue
            news = session.progress(read, now)
            if news is not None:
                outbox.answer(news)

    # ---- from the engine

    def take(self, reports: Iterable[Report]) -> None:
        """Handle what the engine reports of the sessions' work. A report that raises costs only its
        own session."""
        for report in reports:
            session = None
            try:
                lease = report.lease if isinstance(report, Recorded | Failed) else report.job.lease
                session = self.table.find(lease.session, lease.principal)
                if session is None or session.lease is not lease:
                    continue  # it comes for an older lease
                match report:
                    case Answered(_, answer, latency):
                        session.stream_on(answer, self.clock())
                        if session.outbox is not None:
                            session.outbox.answer(answer, latency)
                        self.table.account(session)
                        self._pay(session, answer)
                    case Recorded():
                        self._offer_records(session, report)
                        continue  # they say nothing of its rounds
                    case Waiting():
                        self._wait(session, report)
                    case Dropped():
                        self._drop(session, report)
                    case Failed():
                        self._quarantine(session, report)
                if session.at_rest:  # between two rounds another principal may have its slot
                    self.table.pass_on(session)
            except Exception as error:
                log.exception("a report could not be taken in", extra={"event": "quarantine"})
                self.metrics.quarantined.inc()
                if session is not None:
                    self._quarantine(session, Failed(lease, session.job, type(error).__name__))

    def _wait(self, session: ServerSession, report: Waiting) -> None:
        """Let a stream without a guess wait for some, or go on with guesses that have come
        meanwhile."""
        outputs = session.wait(report, self.clock())
        self.table.pass_on(session)  # nothing of it runs, so another may have its slot
        self.go_on(session, outputs)

    def _offer_records(self, session: ServerSession, recorded: Recorded) -> None:
        """Let records that have been made be sent, when there is time for it."""
        session.records.ready.add(recorded.start, recorded.stop)
        if session.outbox is not None:
            session.outbox.offer(session.records)

    def _drop(self, session: ServerSession, dropped: Dropped) -> None:
        """Tell the device that its round was not run; the round's number may be used again."""
        session.give_up()
        error = dropped.refusal.error(session=session.id, round=dropped.job.request.round)
        is_local = session.outbox is not None and session.outbox.is_local
        self.count_refusal(error, session.principal, is_local=is_local)
        self.perform(session, [error])

    def _pay(self, session: ServerSession, answer: StreamTokens) -> None:
        """Count the tokens that a stream has had run against its principal's rate. Above that rate,
        or above its share of slots, the stream ends with what it has sent, and the device asks for
        the rest."""
        if answer.tokens:
            kind = "foreseen" if answer.foreseen else "stream"
            self.metrics.accepted(answer.drafted, len(answer.tokens) - 1, len(answer.tokens), kind)
            self.metrics.queue_seconds.observe(answer.queue_ms / 1000)
        principal = self.principal(session.principal)
        # Text is what is paid. What is drafted for it here is our choice, and at a limit of ten
        # tokens a second would leave it two of text; its own wrong guesses have a budget of theirs.
        principal.ran(len(answer.tokens), answer.foreseen)
        now = self.clock()
        if session.guesses is not None:
            session.guesses.most = principal.most_guesses(now)
        if session.job is None or session.job.cancelled:
            return
        wait = principal.tokens.wait(0, now)
        if wait > 0 or self.table.must_yield(session):
            session.job.cancelled = True
            is_local = session.outbox is not None and session.outbox.is_local
            if wait > 0 and not is_local:  # an answer of this process asks, and waits, anyway
                self._tell_rate(session, wait)
        else:
            with contextlib.suppress(Refusal):  # if there is no room the engine ends the stream
                self.table.reserve_pages(session)

    def _tell_rate(self, session: ServerSession, wait: float) -> None:
        """Tell the device that its stream ends because its rate is used up, and for how long: it
        would ask at once, or a little later without ever being refused, and its user would never
        learn why the text is slow."""
        error = _above_rate(session.principal, wait).error(session=session.id)
        self.count_refusal(error, session.principal)
        self.perform(session, [error])

    def _quarantine(self, session: ServerSession, failed: Failed) -> None:
        """Forget a session whose work has failed here, and tell its device to open it again. If
        even that fails, the connection ends."""
        refusal = Refusal(
            Code.QUARANTINED, f"this session's work failed here ({failed.reason}): open it again"
        )
        round = failed.job.request.round if failed.job is not None else 0
        try:
            error = refusal.error(session=session.id, round=round)
            self.count_refusal(error, session.principal)
            self.perform(session, [error])
        except Exception:
            log.exception(
                "an error could not be sent", extra={"session": session.id, "event": "quarantine"}
            )
            if session.outbox is not None:
                session.outbox.end(CloseConnection(CloseCode.INTERNAL, "internal error"))
        finally:
            self.table.remove(session, "quarantined")

    def count_refusal(
        self, error: Error, principal: str, peer: str = "", *, is_local: bool = False
    ) -> None:
        """Count and log a refusal, without its message: that may quote the client's text or tokens.
        If it concerns no session, it is of the connection of this `peer`.

        A refusal that is only for now turns no answer of this process itself (`is_local`) away: the
        answer waits, and there is a gauge of those that do. So it is not counted here."""
        if is_local and error.code in _FOR_NOW:
            return
        self.metrics.refusals.labels(error.code, error.limit).inc()
        where = {"session": error.session, "round": error.round, "principal": principal}
        what = {
            "event": "refused",
            "code": error.code,
            "limit": error.limit,
            "peer": peer,
        }
        log.info("refused", extra=where | what)

    def observe(self) -> None:
        """Update the gauges."""
        for state, count in self.table.count().items():
            self.metrics.sessions.labels(state).set(count)
        self.metrics.connections.set(len(self.connections))
        self.metrics.slots_free.set(self.table.slots_free)
        self.metrics.pages_free.set(self.free_pages())
        self.metrics.queue.set(self.work.queued)


def _above_rate(principal: str, wait: float) -> Refusal:
    """The refusal of work of a principal whose rate is used up for so many seconds."""
    whose = "the" if principal == ANONYMOUS else "your key's"
    return Refusal(
        Code.BUSY,
        f"{whose} limit of tokens a second is reached",
        limit="max_tokens_per_second",
        retry_after_ms=int(1000 * wait) + 1,
    )
