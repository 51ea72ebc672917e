"""One connection: messages in, answers out. Runs in the event loop; no sockets, no torch.

A transport feeds frames to `Channel.receive` and sends what the channel's `outbox` holds.
"""

from __future__ import annotations

import asyncio

from cloud_verifier.engine.work import Spent
from cloud_verifier.logs import log
from cloud_verifier.serving.budgets import BYTES, FRAMES, REFUSALS, Meter
from cloud_verifier.serving.handshake import answer_hello, sampling_settings
from cloud_verifier.sessions.outbox import CloseConnection, Outbox
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.store import Session
from moa.wire.codec import check, decode_client
from moa.wire.codes import CloseCode, Code, Refusal
from moa.wire.history import History
from moa.wire.messages import (
    Ack,
    Append,
    Cancel,
    ClientMessage,
    Close,
    Foresee,
    Hello,
    Message,
    Open,
    Resume,
    Resumed,
    Stream,
    Sync,
    Verify,
)
from moa.wire.ranges import Ranges

_RANGES_PER_FRAME = 16
"""Ranges of held rows that take as much work as a small frame; an honest device has a few."""
_TOKENS_PER_FRAME = 64
"""A resume is a small frame, but hashing its log is work: this many tokens count as one frame."""


class Channel:
    """One connection's state."""

    def __init__(self, service: Service, principal: str, meter: Meter, peer: str = "") -> None:
        self.service, self.principal, self.peer = service, principal, peer
        self._meter = meter
        self.sessions: dict[bytes, Session] = {}
        self.features: frozenset[str] = frozenset()
        self.welcomed = asyncio.Event()
        self.outbox = Outbox(service.metrics, service.limits, service.clock)
        self._bad = 0
        self._turned_away: set[bytes] = set()
        """Sessions whose opening was refused for now. The rounds that came along with it are refused too, once each."""
        service.join(self)

    def close(self) -> None:
        """The connection is gone: its sessions wait for its return."""
        self.service.leave(self)
        for session in self.sessions.values():
            self.service.rounds.abandon(session)
            self.service.store.detach(session)
        self.sessions.clear()

    def answer(self, message: Message, spent: Spent | None = None) -> None:
        """Queue an answer, and count its bytes: a small request may have a large answer."""
        self._meter.spend(BYTES, self.outbox.answer(message, spent))

    def offer(self, session: Session) -> None:
        """The session may have records to send."""
        self.outbox.offer(session)

    def _useful(self) -> None:
        self._meter.give_back(FRAMES)

    def flooded(self, limit: str) -> None:
        """The other end floods: send it the limit's name, then close."""
        log.warning(
            "closed: above its budget for too long",
            extra={"peer": self.peer, "principal": self.principal, "event": "flood", "limit": limit},
        )
        self.service.metrics.cuts.labels(limit).inc()
        most = getattr(self.service.limits, limit)
        self.outbox.answer(Refusal(Code.LIMIT, f"more than {most} a second on this connection", limit=limit).error())
        self.outbox.end(CloseConnection(CloseCode.POLICY, limit))

    # ---- in

    async def receive(self, frame: bytes, arrived: float) -> None:
        """Handle one frame with its arrival time. A refusal is answered; too many invalid frames end the connection."""
        await self.outbox.room()
        session, round = b"", 0
        message: ClientMessage | None = None
        try:
            message = decode_client(frame)
            session, round = getattr(message, "session", b""), getattr(message, "round", 0)
            await self._handle(message, arrived)
        except Refusal as refusal:
            if not (refusal.retryable or self._foreseen(refusal, session)):
                self._meter.spend(REFUSALS)
            self._refuse(refusal, session, round)
            most = self.service.limits.max_sessions_per_connection
            if isinstance(message, Open) and refusal.retryable and len(self._turned_away) < most:
                self._turned_away.add(session)
            if refusal.code == Code.BAD_MESSAGE:
                self._bad += 1
                if self._bad > self.service.limits.max_bad_messages:
                    raise CloseConnection(CloseCode.PROTOCOL_ERROR, "too many invalid messages") from None
            if not self.welcomed.is_set():
                raise CloseConnection(CloseCode.PROTOCOL_ERROR, "hello was refused") from None

    def _refuse(self, refusal: Refusal, session: bytes, round: int) -> None:
        self.service.metrics.refusals.labels(refusal.code.value, refusal.limit).inc()
        # The message may quote the client's text or tokens, so it is sent to the client and not logged.
        log.info(
            "refused",
            extra={
                "session": session,
                "round": round,
                "principal": self.principal,
                "code": refusal.code.value,
                "limit": refusal.limit,
            },
        )
        self.answer(refusal.error(session=session, round=round))

    def _foreseen(self, refusal: Refusal, session: bytes) -> bool:
        """Whether this round was sent along with an opening that has been refused: the device could not know."""
        if refusal.code != Code.UNKNOWN_SESSION or session not in self._turned_away:
            return False
        self._turned_away.discard(session)
        return True

    async def _handle(self, message: ClientMessage, arrived: float) -> None:
        if isinstance(message, Hello):
            self._hello(message)
            return
        if not self.welcomed.is_set():
            raise Refusal(Code.BAD_MESSAGE, "the first message must be hello")
        check(message, self.service.limits, self.service.facts.vocab_size)
        self._meter.spend(FRAMES, len(getattr(message, "held", None) or ()) // _RANGES_PER_FRAME)
        match message:
            case Open():
                self._open(message)
            case Resume():
                self._resume(message)
            case Append():
                self._append(message)
            case Verify() | Stream():
                self._round(message, arrived)
            case Foresee():
                self._foresee(message, arrived)
            case Cancel():
                self.service.rounds.cancel(self._own(message.session), message.round)
            case Sync():
                self._sync(message)
            case Ack():
                if self.outbox.record_sender.window.ack(message.received):
                    self._useful()
                    self.outbox.wake.set()
            case Close():
                self._close(message)

    def _hello(self, hello: Hello) -> None:
        if self.welcomed.is_set():
            raise Refusal(Code.BAD_MESSAGE, "hello came twice")
        service = self.service
        welcome = answer_hello(
            hello, service.facts, service.limits, max_context=service.max_context, instance=service.instance
        )
        self.features = frozenset(welcome.features)
        self.outbox.carry(welcome.records)
        self.welcomed.set()
        self.answer(welcome)

    def _open(self, message: Open) -> None:
        service = self.service
        known = service.store.find(message.session, self.principal)
        if known is not None:
            answer = known.history.reopen(message.ids)
            self._attach(known)
            self.answer(answer)
            return
        self._no_draining()
        if len(self.sessions) >= service.limits.max_sessions_per_connection:
            raise Refusal(
                Code.LIMIT, f"{len(self.sessions)} sessions on this connection", limit="max_sessions_per_connection"
            )
        service.store.check_room(message.session, self.principal, len(message.ids))
        ids = message.ids
        if len(ids) >= service.max_context:
            raise Refusal(
                Code.LIMIT,
                f"{len(ids)} prompt tokens leave no room in a context of {service.max_context}",
                limit="max_context_tokens",
            )
        service.charge(self.principal, len(ids))
        now = service.clock()
        session = Session(
            id=message.session,
            principal=self.principal,
            history=History(message, ids, eos_ids=frozenset(service.facts.eos_ids), max_context=service.max_context),
            sampling=sampling_settings(message.sampling),
            records=message.records if "records" in self.features else "off",
            record_rate=message.record_rate,
            held=Ranges(),
            ready=Ranges(),
            used=now,
            streams="stream" in self.features,
        )
        session.edge_holds(message.held)
        service.rounds.prepare(session)
        service.store.add(session)
        service.metrics.opens.inc()
        self._useful()
        log.info(
            "session opened",
            extra={
                "event": "opened",
                "session": session.id,
                "principal": self.principal,
                "peer": self.peer,
                "prompt_tokens": len(ids),
            },
        )
        self._attach(session)
        self.answer(session.history.reopen(ids))

    def _resume(self, message: Resume) -> None:
        store, metrics = self.service.store, self.service.metrics
        try:
            session = store.get(message.session, self.principal)
            # Of what will be looked at, not of what is said: one number must not use up the budget of hours.
            self._meter.spend(FRAMES, min(message.length, len(session.history.ids)) // _TOKENS_PER_FRAME)
            answer = session.history.resume(message, "resumed" if session.lease is not None else "reprefilled")
        except Refusal as refusal:
            # If the logs differ, the edge's log counts, because it was shown to the user. It opens the session again.
            if refusal.code == Code.CONFLICT:
                self.service.rounds.abandon(session)
                store.remove(session, "logs_differ")
            metrics.resumes.labels("gone").inc()
            self.answer(Resumed(session=message.session, outcome="gone"))
            return
        self._attach(session)
        session.edge_holds(message.held)
        session.records = message.records if "records" in self.features else "off"
        session.record_rate = message.record_rate
        store.account(session)
        metrics.resumes.labels(answer.outcome).inc()
        self.answer(answer)
        if session.lease is None and not self.service.draining:
            try:
                self.service.rounds.prepare(session)
            except Refusal as refusal:  # no slot now: its next round tries again
                log.info("no slot on resume", extra={"session": session.id, "limit": refusal.limit})

    def _append(self, message: Append) -> None:
        session = self._own(message.session)
        self._no_draining()
        self.service.charge(self.principal, len(message.ids))
        self.service.store.check_growth(session, len(message.ids))
        before = len(session.history.ids)
        answer = session.history.append(message)
        if len(session.history.ids) > before:
            self._useful()
        self.service.store.account(session)
        self.service.rounds.prepare_if_held(session)
        self.answer(answer)

    def _round(self, message: Verify | Stream, arrived: float) -> None:
        session = self._own(message.session)
        if isinstance(message, Stream) and "stream" not in self.features:
            raise Refusal(Code.UNSUPPORTED, "server-drafted streams were not agreed")
        if isinstance(message, Stream) and message.waits and "foresee" not in self.features:
            raise Refusal(Code.UNSUPPORTED, "guesses ahead of a stream were not agreed")
        if (settled := self.service.rounds.admit(session, message)) is not None:
            if settled != "running":
                self.answer(settled)
            return
        try:
            self._no_draining()
            self.service.charge(self.principal, len(message.tokens) if isinstance(message, Verify) else 0)
            self.service.rounds.submit(session, message, arrived)
            self._useful()
        except Refusal:
            session.history.give_up()
            session.guesses = None
            raise

    def _foresee(self, message: Foresee, arrived: float) -> None:
        if "foresee" not in self.features:
            raise Refusal(Code.UNSUPPORTED, "guesses ahead of a stream were not agreed")
        session = self.service.store.find(message.session, self.principal)
        # Guesses are never refused: their session may have been refused, closed or taken over while they were sent.
        if session is not None and session.owner is self and self.service.rounds.foresee(session, message, arrived):
            self._useful()

    def _sync(self, message: Sync) -> None:
        session = self._own(message.session)
        session.records = message.records if "records" in self.features else "off"
        session.record_rate = message.record_rate
        if message.held is not None:
            session.edge_holds(message.held)
            self.service.store.account(session)
        self.service.store.fit_records(session)
        self.service.scheduler.wake()
        self.outbox.offer(session)

    def _close(self, message: Close) -> None:
        session = self.service.store.find(message.session, self.principal)
        if session is not None:
            self.service.store.remove(session, "closed")

    # ---- sessions of this connection

    def _own(self, id: bytes) -> Session:
        session = self.service.store.get(id, self.principal)
        if session.owner is not self:
            raise Refusal(Code.CONFLICT, "resume this session on this connection first", session=id)
        return session

    def _attach(self, session: Session) -> None:
        if session.owner is not None and session.owner is not self:
            session.owner.let_go(session)
        session.owner = self
        self.sessions[session.id] = session
        self.outbox.offer(session)

    def let_go(self, session: Session) -> None:
        """The session is closed, or another connection has taken it over."""
        self.sessions.pop(session.id, None)
        self.outbox.record_sender.forget(session.id)
        session.owner = None

    def _no_draining(self) -> None:
        if self.service.draining:
            raise Refusal(Code.DRAINING, "this verifier is stopping", retry_after_ms=0)
