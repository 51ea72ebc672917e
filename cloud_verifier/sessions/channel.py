"""One connection's messages: decoded, checked, passed to their sessions. Runs in the event loop; no
sockets, no torch.

A transport feeds frames to `Channel.receive` and sends what the channel's `outbox` holds.
"""

from __future__ import annotations

import asyncio
import re

from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.logs import log
from cloud_verifier.sessions.budgets import FRAMES, REFUSALS, Meter
from cloud_verifier.sessions.outbox import CloseConnection, Outbox
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.session import BYTES_PER_TOKEN, Output, ServerSession, message_bytes
from moa.grammar.matcher import MATCHER_BYTES, Matcher
from moa.version import running_version
from moa.wire.codec import check, decode_client, wire_limits
from moa.wire.codes import CloseCode, Code, Refusal
from moa.wire.limits import Limits
from moa.wire.messages import (
    Ack,
    Append,
    Cancel,
    ClientMessage,
    Close,
    Foresee,
    Hello,
    Open,
    Resume,
    Resumed,
    Stream,
    Sync,
    Welcome,
    round_of,
)
from moa.wire.versions import agree_features, agree_version

_RANGES_PER_FRAME = 16
"""So many ranges of held rows take as much work as a small frame; an honest device has a few."""
_TOKENS_PER_FRAME = 64
"""A resume is a small frame, but hashing its log is work: so many tokens count as one frame."""


class Channel:
    """One connection's state."""

    def __init__(
        self,
        service: Service,
        principal: str,
        meter: Meter,
        peer: str = "",
        *,
        is_local: bool = False,
    ) -> None:
        """Begin a connection of `principal`; `meter` counts what it costs, and `peer` is its
        address. `is_local`: as in its `Outbox`."""
        self.service = service
        self.principal = principal
        self.peer = peer
        self.limits = service.limits
        self.table = service.table
        self.features: frozenset[str] = frozenset()
        """What both ends have agreed on in the hello."""
        self.welcomed = asyncio.Event()
        self.outbox = Outbox(
            service.metrics, service.limits, service.clock, meter, is_local=is_local
        )
        self._meter = meter
        self._bad_messages = 0
        self._refused_prompts: dict[bytes, Refusal | None] = {}
        """Sessions whose latest open or append was refused, and with what. A round that was sent right
        behind it, before the device could know, is refused with the same: once, at no cost, and
        without a word in the log. None where that is done."""
        service.join(self.outbox, principal)

    def close(self) -> None:
        """The connection is gone."""
        self.service.leave(self.outbox)

    def flooded(self, limit: str) -> None:
        """Tell the other end that it sends too much, by the name of the limit, and close the
        connection."""
        log.warning(
            "closed: above its budget for too long",
            extra={
                "peer": self.peer,
                "principal": self.principal,
                "event": "flood",
                "limit": limit,
            },
        )
        self.service.metrics.cuts.labels(limit).inc()
        most = getattr(self.limits, limit)
        self.outbox.answer(
            Refusal(
                Code.LIMIT, f"more than {most} a second on this connection", limit=limit
            ).error()
        )
        self.outbox.end(CloseConnection(CloseCode.POLICY, limit))

    def revoked(self) -> None:
        """Close the connection, because its token was revoked, and end its sessions: nobody is to
        come back for them, and they would keep their slots. The device keeps its text, connects
        again and is refused."""
        for id in list(self.outbox.sessions):
            session = self.table.find(id, self.principal)
            if session is not None:
                self.table.remove(session, "revoked")
        self.outbox.end(CloseConnection(CloseCode.POLICY, "the token was revoked"))

    async def receive(self, frame: bytes, arrived: float) -> None:
        """Handle one frame of the device, which arrived at that time. What cannot be done is
        answered with a refusal; too many invalid frames end the connection."""
        await self.outbox.room()  # a device that does not read its answers is not read either
        message: ClientMessage | None = None
        try:
            message = decode_client(frame)
            if not (self.welcomed.is_set() or isinstance(message, Hello)):
                raise Refusal(Code.BAD_MESSAGE, "the first message must be hello")
            check(message, self.limits, self.service.facts.vocab_size)
            # Ranges of activation records that the device says it holds: they take time to read.
            held = getattr(message, "held", None)
            if held:
                self._meter.spend(FRAMES, len(held) // _RANGES_PER_FRAME)
            match message:
                case Stream():
                    self._stream(message, arrived)
                case Foresee():
                    self._foresee(message, arrived)
                case Open():
                    await self._open(message)
                case Resume():
                    self._resume(message)
                case Append():
                    await self._append(message)
                case Cancel():
                    self._cancel(message)
                case Sync():
                    self._sync(message)
                case Ack():
                    self._ack(message)
                case Close():
                    self._close(message)
                case Hello():
                    self._hello(message)
        except Refusal as refusal:
            earlier = self._refusal_before(refusal, message)
            if earlier is not None:
                session = getattr(message, "session", b"")
                self.outbox.answer(earlier.error(session=session, round=round_of(message)))
            else:
                self._refuse(refusal, message)
        else:
            if isinstance(message, Open | Append | Resume | Stream | Close):
                self._refused_prompts.pop(message.session, None)

    def _refusal_before(self, refusal: Refusal, message: ClientMessage | None) -> Refusal | None:
        """The refusal of the open or append that a round was sent right behind, where the round fits
        no session for want of it; None of any other message. Its own refusal would have the device
        open a session anew that has only to wait."""
        if not isinstance(message, Stream):
            return None
        if refusal.code not in (Code.UNKNOWN_SESSION, Code.CONFLICT):
            return None
        earlier = self._refused_prompts.get(message.session)
        if earlier is not None:
            self._refused_prompts[message.session] = None
        return earlier

    def _refuse(self, refusal: Refusal, message: ClientMessage | None) -> None:
        """Answer a message with a refusal, and count it. Too many invalid messages, or a refused
        hello, end the connection."""
        session = getattr(message, "session", b"")
        error = refusal.error(session=session, round=round_of(message))
        self._note_refused_prompt(refusal, message)
        if not refusal.retryable:  # refused for now: the device is not to blame
            self._meter.spend(REFUSALS)
        self.service.count_refusal(error, self.principal, is_local=self.outbox.is_local)
        self.outbox.answer(error)
        if refusal.code == Code.BAD_MESSAGE:
            self._bad_messages += 1
            if self._bad_messages > self.limits.max_bad_messages:
                raise CloseConnection(
                    CloseCode.PROTOCOL_ERROR, "too many invalid messages"
                ) from None
        if not self.welcomed.is_set():
            raise CloseConnection(CloseCode.PROTOCOL_ERROR, "hello was refused") from None

    def _note_refused_prompt(self, refusal: Refusal, message: ClientMessage | None) -> None:
        """Keep with what an open or append is refused, for the round that may follow it."""
        if not isinstance(message, Open | Append):
            return
        self._refused_prompts.pop(message.session, None)
        self._refused_prompts[message.session] = refusal
        if len(self._refused_prompts) > self.limits.max_sessions_per_connection:
            del self._refused_prompts[next(iter(self._refused_prompts))]  # the oldest

    async def _matcher(self, message: Open | Append, start: int) -> Matcher | None:
        """Compile the grammar of an answer that begins at position `start`; None if the message has
        no grammar. Meanwhile later frames of this connection wait, those of others do not."""
        if message.grammar is None:
            return None
        self._agreed("grammar", "answers that match a grammar")
        log = message.ids if isinstance(message, Open) else ()
        matcher = await self.service.matcher(self.principal, message.grammar, start, log)
        # Its token may have been revoked meanwhile: a session that began now would stay.
        self.outbox.check_goes_on()
        return matcher

    # ---- message by message

    def _hello(self, hello: Hello) -> None:
        """Welcome the device with what was agreed on, or refuse it."""
        if self.welcomed.is_set():
            raise Refusal(Code.BAD_MESSAGE, "hello came twice")
        service = self.service
        welcome = answer_hello(
            hello,
            service.facts,
            self.limits,
            max_context=service.max_context,
            instance=service.instance,
        )
        self.features = frozenset(welcome.features)
        self.outbox.carry(welcome.records)
        self.welcomed.set()
        self.outbox.answer(welcome)
        if "behind" in self.features:
            service.tell_what_is_behind(self.outbox)

    def _stream(self, message: Stream, arrived: float) -> None:
        """Run a round, a session's request for a stream of tokens. A request that was repeated gets
        its answer again."""
        session = self._own(message.session)
        if message.waits:
            self._agreed("foresee", "guesses at a stream")
        most_guesses = self.service.most_guesses(self.principal)
        outputs = session.stream(message, arrived, most_guesses=most_guesses)
        is_repeated = session.running is not message
        if is_repeated:
            self.service.perform(session, outputs)
            return
        try:
            # The tokens of a stream are counted as they come (`Service._pay`).
            # An answer of this process has nowhere else to go on: a drain waits for it.
            self.service.admit(self.principal, 0, is_begun=self.outbox.is_local)
            self.service.perform(session, outputs)
        except BaseException:
            session.give_up()  # the same number may be asked for again
            raise
        self._meter.refund()

    def _foresee(self, message: Foresee, arrived: float) -> None:
        """Give the device's guesses to the session whose stream they are for. Guesses are never
        refused: that session may have been closed or taken over while they were sent."""
        self._agreed("foresee", "guesses at a stream")
        session = self.table.find(message.session, self.principal)
        if session is not None and session.outbox is self.outbox:
            outputs, counts_as_work = session.foresee(message, arrived)
            self.service.go_on(session, outputs)
            if counts_as_work:
                self._meter.refund()

    async def _open(self, message: Open) -> None:
        """Open a session with its prompt, or answer the repeated opening of one."""
        answer_start = len(message.ids) - message.generated
        matcher = await self._matcher(message, answer_start)
        session = self.table.find(message.session, self.principal)
        if session is None:
            session = self._new_session(message, matcher)
        answer = session.open(message)
        session.attach(self.outbox)
        self.service.perform(session, answer)

    def _new_session(self, message: Open, matcher: Matcher | None) -> ServerSession:
        """Returns a new session with this prompt; a `Refusal` if the connection has too many."""
        own = len(self.outbox.sessions)
        if own >= self.limits.max_sessions_per_connection:
            raise Refusal(
                Code.LIMIT,
                f"{own} sessions on this connection",
                limit="max_sessions_per_connection",
            )
        session = self.service.open(message, self.principal, self.features, matcher)
        self._meter.refund()
        fields = {
            "event": "opened",
            "session": session.id,
            "principal": self.principal,
            "peer": self.peer,
        }
        log.info("session opened", extra=fields | {"prompt_tokens": len(message.ids)})
        return session

    def _resume(self, message: Resume) -> None:
        """Let a session go on from this connection. Where it is gone, or has another log than the
        device, the device is told to open it again."""
        metrics = self.service.metrics
        session = self.table.find(message.session, self.principal)
        outputs = self._resumed(session, message) if session is not None else []
        if session is None or not outputs:
            metrics.resumes.labels("gone").inc()
            self.outbox.answer(Resumed(session=message.session, outcome="gone"))
            return
        answer, *work = outputs  # work: a prompt to run once more
        session.used = self.service.clock()
        session.attach(self.outbox)
        session.want_records(message.records, message.record_rate, message.held, self.features)
        metrics.resumes.labels("reprefilled" if work else "resumed").inc()
        self.service.prepare(session, [answer] if self.service.draining else outputs)

    def _resumed(self, session: ServerSession, message: Resume) -> list[Output]:
        """Returns what a session answers to a device that comes back, and what is to be run for it.
        Empty if their logs differ: then the session is forgotten, because the device's log counts,
        which was shown to the user."""
        # The hash of the log takes time: of as many tokens as there are, not of the stated length,
        # or one number would use up the budget of hours.
        hashed = min(message.length, len(session.log))
        self._meter.spend(FRAMES, hashed // _TOKENS_PER_FRAME)
        try:
            return session.resume(message)
        except Refusal:
            self.table.remove(session, "logs_differ")
            return []

    async def _append(self, message: Append) -> None:
        """Begin the next turn of a session: its prompt joins the log."""
        matcher = await self._matcher(message, message.base + len(message.ids))
        session = self._own(message.session)
        # Bytes by which the session grows.
        growth = BYTES_PER_TOKEN * len(message.ids)
        if matcher is not None and session.matcher is None:
            growth += MATCHER_BYTES
        growth += max(0, message_bytes(message.messages) - session.message_bytes)
        before = len(session.log)
        with self.service.admitted(self.principal, len(message.ids)):
            self.table.check_logs(session, growth)
            outputs = session.append(message, matcher)
        is_new = len(session.log) > before
        if is_new:
            self._meter.refund()
        self.service.prepare(session, outputs)

    def _cancel(self, message: Cancel) -> None:
        """Stop a session's round, or a stream that waits for guesses."""
        is_open = self.table.find(message.session, self.principal) is not None
        if not is_open and message.session in self._refused_prompts:
            return  # its round was refused with the opening: nothing runs
        session = self._own(message.session)
        self.service.perform(session, session.cancel(message.round))

    def _ack(self, message: Ack) -> None:
        """Learn that the device has received activation records. A number that is not new costs one
        frame of the connection's budget."""
        if self.outbox.ack(message.received):
            self._meter.refund()

    def _sync(self, message: Sync) -> None:
        """Change which records the device wants of a session."""
        session = self._own(message.session)
        session.want_records(message.records, message.record_rate, message.held, self.features)
        self.table.account(session)
        self.table.fit_records(session)
        self.service.work.wake()
        self.outbox.offer(session.records)

    def _close(self, message: Close) -> None:
        """Forget a session."""
        session = self.table.find(message.session, self.principal)
        if session is not None:
            self.table.remove(session, "closed")

    # ---- helpers

    def _own(self, id: bytes) -> ServerSession:
        """The session of this id, which must be attached to this connection; else a `Refusal`."""
        return self.table.attached(id, self.principal, self.outbox)

    def _agreed(self, feature: str, what: str) -> None:
        """Raise a `Refusal` if this feature, which `what` needs, was not agreed in the hello."""
        if feature not in self.features:
            raise Refusal(Code.UNSUPPORTED, f"{what} were not agreed")


def answer_hello(
    hello: Hello, facts: ModelFacts, limits: Limits, *, max_context: int, instance: str
) -> Welcome:
    """Returns the welcome for a device's hello: the features that both ends have, this verifier's
    limits, and notices for the user. A `Refusal` if version, tokenizer or target do not match."""
    version = agree_version(hello.versions)
    if version is None:
        raise Refusal(Code.VERSION, "no protocol version in common")
    if hello.tokenizer and facts.tokenizer and hello.tokenizer != facts.tokenizer:
        raise Refusal(
            Code.TOKENIZER, "the target here has another tokenizer than this client's drafter"
        )
    notices = [*facts.notices, *_target_notices(hello, facts)]
    records = None
    if "records" in hello.features:
        notices += _record_notices(hello, facts)
        if _same_drafter(hello, facts):
            records = facts.records
    lacking = {
        "records": records is None,
        "grammar": not facts.grammars,
        "foresee": not facts.takes_guesses,
        "logprobs": not facts.tells_logprobs,
        "penalties": not facts.counts_penalties,
        "messages": not facts.takes_messages,
        "behind": not facts.has_engine_behind,
    }
    features = agree_features(
        hello.features, without=[name for name, lacks in lacking.items() if lacks]
    )
    return Welcome(
        version=version,
        features=features,
        server=f"cloud-verifier/{running_version()}",
        instance=instance,
        tokenizer=facts.tokenizer,
        target=facts.target,
        drafter=facts.drafter,
        vocab_size=facts.vocab_size,
        eos_ids=list(facts.eos_ids),
        limits=wire_limits(limits, max_context_tokens=max_context),
        records=records,
        notices=notices,
        computes=facts.computes,
        promise=facts.promise,
    )


def _target_notices(hello: Hello, facts: ModelFacts) -> list[str]:
    """Returns what a user must know of the target that the device's bundle names, if anything; a
    `Refusal` if another one is served here. Where one of the two names no target, nothing is known
    to differ."""
    if not (hello.target and facts.target) or hello.target == facts.target:
        return []
    if not _of_some_bytes(hello.target):
        raise Refusal(Code.TARGET, "another target is served here")
    return [
        "old_identity: this bundle names its target by some bytes of it, as older versions did, "
        "which is not compared; make it again with moa-export build"
    ]


def _record_notices(hello: Hello, facts: ModelFacts) -> list[str]:
    """Returns why a device that wants activation records gets none, if that is so."""
    if facts.records is None and facts.sends_records:
        return ["no_records: this verifier has no drafter to make activation records with"]
    if _same_drafter(hello, facts):
        return []
    notice = (
        "drafter_mismatch: no records for this drafter; serve --drafter with the one it came from"
    )
    if _of_some_bytes(hello.drafter):
        notice += ", and make the bundle again"
    return [notice]


def _same_drafter(hello: Hello, facts: ModelFacts) -> bool:
    """Whether device and verifier have the same drafter. Where one of the two names none, nothing is
    known to differ."""
    return not (hello.drafter and facts.drafter) or hello.drafter == facts.drafter


_OLD_IDENTITY = re.compile("[0-9a-f]{64}")
"""How older versions named what they had hashed some bytes of."""


def _of_some_bytes(identity: str) -> bool:
    """Whether an identity was made by an older version, of some bytes of what it names."""
    return _OLD_IDENTITY.fullmatch(identity) is not None
