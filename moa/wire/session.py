"""The edge's side of a session, without I/O: what to send, what an answer means, and how to recover
lost messages.

    session = ClientSession(ids, max_new_tokens=200)
    send(session.open())
    send(session.stream())                       # may follow at once, before `Opened`
    send(session.foresee(tokens, parents, neg_log_probs))    # while it runs, as often as it likes
    event = session.receive(message)             # of moa/wire/events.py; None for a repetition
    # after a new connection (hello and welcome are done):
    for message in session.recover(): send(message)
    ... and after the event `Recovered`: for message in event.resend: send(message)

The log contains verified tokens only. Text written offline joins it when a stream has
brought the same.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from moa.errors import ProtocolError
from moa.grammar.spec import Grammar
from moa.logprobs import TokenLogprobs, unpack
from moa.wire.codec import chain_hash
from moa.wire.codes import RETRYABLE, Code
from moa.wire.events import (
    Advanced,
    Ready,
    RecordsArrived,
    Recovered,
    Refused,
    Request,
    SessionEvent,
    Working,
)
from moa.wire.messages import (
    Activations,
    Append,
    Cancel,
    ChatMessage,
    Close,
    Error,
    Finish,
    Foresee,
    Open,
    Opened,
    Penalties,
    Progress,
    RecordDtype,
    Resume,
    Resumed,
    Sampling,
    ServerMessage,
    Stream,
    StreamTokens,
    round_of,
)
from moa.wire.ranges import Ranges

R = TypeVar("R", Open, Append, Stream)


@dataclass
class ClientSession:
    """One session as the edge sees it; `log` starts as the prompt."""

    log: list[int]
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    records: RecordDtype = "int8"
    record_rate: int = 0
    logprobs: int = -1
    """Number of likeliest tokens to request log-probabilities of, with each token's own; -1: none."""
    grammar: Grammar | None = None
    """What the turn's answer must match."""
    penalties: Penalties | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    """The conversation that the turn answers, for a verifier that wants to be told it."""
    tells_messages: bool = False
    """Whether the verifier does."""
    id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    vocab_size: int = 2**31
    """Vocabulary of the target, once known: an answer with another id is refused."""

    settled: int = field(init=False, default=0)
    """Tokens of the log that the server is known to have."""
    round: int = field(init=False, default=0)
    """The last round that was answered to its end."""
    epoch: int = field(init=False, default=0)
    """The server's count of the session's records so far, to be told it when the session resumes."""
    finish: Finish = field(init=False, default="")
    """Why the turn ended; empty while it goes on."""
    turn_start: int = field(init=False)
    """Position of the turn's first output token."""
    token_logprobs: dict[int, TokenLogprobs] = field(init=False, default_factory=dict)
    """Log-probabilities of this turn's tokens, by position."""
    held: Ranges = field(init=False, default_factory=Ranges)
    """Positions whose activation records have arrived."""
    unsettled: list[Request] = field(init=False, default_factory=list)
    """Requests without an answer yet, in order: at most an open or append, and a round."""

    _resuming: bool = field(init=False, default=False)
    """Whether a `Resume` was sent that has not been answered."""

    def __post_init__(self) -> None:
        self.turn_start = len(self.log)

    def another(self, ids: Sequence[int]) -> ClientSession:
        """Return a new session with an id of its own that asks for the same, with these ids as its
        log."""
        return dataclasses.replace(self, log=list(ids), id=secrets.token_bytes(16))

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.log) - 1

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self.streaming is not None

    @property
    def streaming(self) -> Stream | None:
        """The stream under way; None where there is none."""
        for request in self.unsettled:
            if isinstance(request, Stream):
                return request
        return None

    @property
    def opening(self) -> bool:
        """Whether an open or append has not been accepted yet. A round that was sent behind it has no
        place before: where it is refused, the answer to the open or append counts."""
        return self._opening_request() is not None

    def waits_for(self, round: int) -> bool:
        """Whether this round has not been answered yet."""
        return self.streaming is not None and self.streaming.round == round

    # ---- what to send

    def open(self) -> Open:
        """Return the first message of the session, and note that its answer is waited for."""
        return self._ask(self._open(self.log))

    def append(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        ignore_eos: bool | None = None,
        logprobs: int = -1,
        grammar: Grammar | None = None,
        messages: Sequence[ChatMessage] = (),
    ) -> Append:
        """Return the message that begins the next turn: its prompt `ids`, which join the log at
        once, and its settings. Those that are None stay as they were in the turn before."""
        self._not_busy()
        if max_new_tokens is not None:
            self.max_new_tokens = max_new_tokens
        if stop is not None:
            self.stop = list(stop)
        if ignore_eos is not None:
            self.ignore_eos = ignore_eos
        self.logprobs = logprobs
        self.grammar = grammar
        self.messages = list(messages)
        message = Append(
            session=self.id,
            base=len(self.log),
            ids=list(ids),
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            grammar=grammar,
            messages=self.messages if self.tells_messages else [],
        )
        self.log += ids
        self.finish = ""
        self.token_logprobs = {}
        self.turn_start = len(self.log)
        return self._ask(message)

    def stream(self, *, speculate: bool = True, waits: bool = False) -> Stream:
        """Return the message that begins the next round. With `speculate` the server drafts for it;
        with `waits` it waits for this end's guesses and decodes nothing without them."""
        self._not_busy()
        return self._ask(Stream(self.id, self.round + 1, self.base, speculate, waits))

    def foresee(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        neg_log_probs: Sequence[int],
        waits: bool | None = None,
    ) -> Foresee:
        """Return the message with guesses at what the running stream will bring, for the server to
        verify: a tree of tokens whose root is the log's last token. `neg_log_probs` say how likely
        each is after its parent, as the wire has it. `waits`, if given, changes whether the stream
        waits for guesses. There is no answer."""
        stream = self.streaming
        if stream is None or tokens[0] != self.log[-1]:
            raise ProtocolError("guesses need a running stream, and begin at the log's end")
        return Foresee(
            self.id,
            stream.round,
            self.base,
            list(tokens),
            list(parents),
            list(neg_log_probs),
            waits,
        )

    def cancel(self) -> Cancel | None:
        """Return the message that stops the running round, whose answer still comes; None where no
        round runs."""
        stream = self.streaming
        if stream is None:
            return None
        return Cancel(self.id, stream.round)

    def close(self) -> Close:
        """Return the last message of the session; no answer is waited for any more."""
        self.unsettled.clear()
        return Close(self.id)

    def recover(self) -> list[Request | Resume]:
        """Return what to send first on a new connection, after the earlier one was lost. If the
        server is not known to have the session, that is every request without an answer, again;
        else a `Resume`, whose answer says what either end has missed."""
        if self.settled == 0:  # nothing was ever answered
            return list(self.unsettled)
        self._resuming = True
        return [
            Resume(
                session=self.id,
                length=self.settled,
                chain=chain_hash(self.log[: self.settled]),
                round=self.round,
                epoch=self.epoch,
                records=self.records,
                record_rate=self.record_rate,
                held=list(self.held),
            )
        ]

    # ---- what an answer means

    def receive(self, message: ServerMessage) -> SessionEvent | None:
        """Take in a message of this session, and return what it means; None if it is a repetition of
        what is known."""
        match message:
            case Opened():
                return self._opened(message)
            case StreamTokens():
                return self._stream_tokens(message)
            case Progress():
                if not self.waits_for(message.round):
                    return None
                return Working(message.done, message.total)
            case Activations():
                self.held.add(message.start, message.start + message.rows)
                self.epoch = max(self.epoch, message.epoch)
                return RecordsArrived(message)
            case Resumed():
                return self._resumed(message)
            case Error():
                return self._error(message)
            case _:
                raise ProtocolError(f"a session does not take {type(message).__name__}")

    def _opened(self, message: Opened) -> Ready | None:
        """Take in that the server has the prompt of the open or append that waits for an answer.
        None if none waits, or if this is an answer to an earlier one."""
        request = self._opening_request()
        if request is None:
            return None
        if len(self.log) < message.length:
            raise ProtocolError(
                f"the server's log has {message.length} tokens, ours {len(self.log)}"
            )
        length_after = len(request.ids)
        if isinstance(request, Append):
            length_after += request.base
        if message.length != length_after:
            return None  # the answer to an earlier opening, once more
        self.unsettled.remove(request)
        self.settled = message.length
        self.epoch = message.epoch
        return Ready(message.length)

    def _opening_request(self) -> Open | Append | None:
        """The open or append that has not been answered yet; None where there is none."""
        for request in self.unsettled:
            if isinstance(request, Open | Append):
                return request
        return None

    def _stream_tokens(self, message: StreamTokens) -> Advanced | None:
        """Take in tokens of the running round, which join the log. After a lost connection the
        server may repeat some that are in it already: these are compared with it. None if the round
        is not the running one."""
        request = self.streaming
        if request is None or request.round != message.round:
            return None
        known = self.base - message.base  # how many of the tokens the log has already
        if known < 0:
            raise ProtocolError(
                f"stream tokens at {message.base + 1}, but the log ends at {self.base}"
            )
        self._same(message.base + 1, message.tokens[:known])
        tokens = tuple(message.tokens[known:])
        length_after = len(self.log) + len(tokens)
        self._check(tokens, length_after)
        self._keep_logprobs(message.logprobs, length_after)
        base = self.base
        self.log += tokens
        self.settled = len(self.log)
        self.finish = message.finish
        if message.done:
            # The server has answered a later request, so the earlier ones are settled too.
            self.unsettled.clear()
            self.round = request.round
        return Advanced(
            round=request.round,
            base=base,
            tokens=tokens,
            finish=message.finish,
            done=message.done,
            queue_ms=message.queue_ms,
            forward_ms=message.forward_ms,
            drafted=message.drafted,
            foreseen=message.foreseen,
            usage=message.usage,
        )

    def _resumed(self, message: Resumed) -> Recovered | None:
        """Take in the answer to a `Resume`. If the server has the session, still or again, the
        tokens that were missed (`tail`) join the log, and the event says which requests must be
        sent again because the server has not got them. None if no `Resume` waits for an answer."""
        if not self._resuming:
            return None
        self._resuming = False
        if message.outcome == "gone":
            return self._gone()
        if message.length != self.settled + len(message.tail):
            raise ProtocolError("the tail of a resumed session does not reach its length")
        self._check(message.tail, message.length)
        self._keep_logprobs(message.logprobs, message.length)
        last_known = self.settled - 1 + self._told_again(message)
        unanswered = [one for one in self.unsettled if not _is_got(one, message)]
        log = self._log_behind(message.tail, unanswered)
        tokens = tuple(log[last_known + 1 : message.length])
        self.log = log
        self.settled = message.length
        self.unsettled = unanswered
        self.round = message.round
        # Else keep our own `finish`: a server that got the log again does not know the turn's end.
        if message.tail:
            self.finish = message.finish
        self.epoch = message.epoch
        resend = [one for one in unanswered if not _is_running(one, message)]
        return Recovered(message.outcome, last_known, tokens, self.finish, tuple(resend))

    def _log_behind(self, tail: Sequence[int], unanswered: Sequence[Request]) -> list[int]:
        """The log that a resumed session has: what was settled, the tail that the server brings, and
        the ids of appends that it has not got yet."""
        log = [*self.log[: self.settled], *tail]
        for request in unanswered:
            if isinstance(request, Append):
                log += request.ids
        return log

    def _told_again(self, message: Resumed) -> int:
        """How many of the first tokens of a resumed session's tail are no news: the ids of appends
        that the server has got. A prompt is no output, but the server tells it again."""
        count = 0
        for request in self.unsettled:
            if isinstance(request, Append) and _is_got(request, message):
                self._same(request.base, message.tail[: len(request.ids)])
                count += len(request.ids)
        return count

    def _gone(self) -> Recovered:
        """Take in that the server does not have the session any more. It is to be opened again with
        all tokens that were verified, and requests without an answer are to be sent again behind
        that."""
        # Before the first answer nothing is settled, and the log is the prompt.
        known = self.log[: self.settled] if self.settled else self.log
        requests: list[Request] = [self._open(known)]
        for request in self.unsettled:
            if isinstance(request, Append):
                requests.append(request)
            elif isinstance(request, Stream):
                # If it has brought tokens, it goes on behind them: the opening tells them.
                requests.append(replace(request, base=self.base))
        self.unsettled = requests
        return Recovered("gone", self.settled - 1, (), self.finish, tuple(requests))

    def _error(self, message: Error) -> Refused | Recovered:
        """Take in that the server has refused something. If it does not know the session, that must
        be opened again. Else the error is of the round that it names, or of all requests without an
        answer; they are given up, unless the same requests may succeed later."""
        if message.code in (Code.UNKNOWN_SESSION, Code.QUARANTINED):
            return self._gone()
        retry = message.code in RETRYABLE
        if not retry:
            still_valid: list[Request] = []
            if message.round:
                # Of another round, or an opening, which names none.
                still_valid = [r for r in self.unsettled if round_of(r) != message.round]
            self.unsettled = still_valid
        return Refused(message, retry)

    # ---- helpers

    def _same(self, start: int, tokens: Sequence[int]) -> None:
        """Raise a `ProtocolError` unless the log has these tokens, which the server repeats, from
        position `start` on. Behind other tokens than ours its text would not go with our log."""
        if self.log[start : start + len(tokens)] != list(tokens):
            raise ProtocolError(f"the server's tokens from position {start} on differ from ours")

    def _keep_logprobs(self, logprobs: bytes, stop: int) -> None:
        """Keep the log-probabilities that an answer brought, if any, by position. `logprobs` are
        rows in the layout of `moa.logprobs`, of the last tokens before position `stop`."""
        if logprobs:
            rows = unpack(logprobs, self.logprobs, self.vocab_size)
            if len(rows) > stop - self.turn_start:
                raise ProtocolError("log-probabilities of more tokens than there are")
            self.token_logprobs |= enumerate(rows, stop - len(rows))

    def _check(self, tokens: Sequence[int], length: int) -> None:
        """A `ProtocolError` unless an answer's ids are of the target's vocabulary, and the log, which
        has `length` tokens with them, has no more of this turn than were asked for."""
        if tokens and max(tokens) >= self.vocab_size:
            raise ProtocolError(f"token id {max(tokens)} of a vocabulary of {self.vocab_size}")
        if length - self.turn_start > self.max_new_tokens:
            raise ProtocolError(f"more than the {self.max_new_tokens} tokens that were asked for")

    def _open(self, ids: Sequence[int]) -> Open:
        """The message that opens the session with these ids: the prompt of its first turn, or, for
        a server that has lost the session, all tokens so far, the last of which may be output."""
        return Open(
            session=self.id,
            ids=list(ids),
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            generated=max(0, len(ids) - self.turn_start),
            round=self.round,
            records=self.records,
            record_rate=self.record_rate,
            held=list(self.held),
            logprobs=self.logprobs,
            grammar=self.grammar,
            penalties=self.penalties,
            messages=self.messages if self.tells_messages else [],
        )

    def _ask(self, request: R) -> R:
        """Return a request, and note that its answer is waited for."""
        self.unsettled.append(request)
        return request

    def _not_busy(self) -> None:
        """A `ProtocolError` while a round is under way: a session has one at a time."""
        if self.busy:
            raise ProtocolError("a round is under way: wait for its answer, or cancel it")


def _is_got(request: Request, resumed: Resumed) -> bool:
    """Whether the server, which has resumed the session like this, has got a request."""
    if isinstance(request, Append):
        return resumed.length > request.base
    if isinstance(request, Stream):
        return resumed.round >= request.round
    return True  # it has the session, so it has been opened


def _is_running(request: Request, resumed: Resumed) -> bool:
    """Whether this is the request of the round that still runs at the server. To send it again would
    be harmless, for it is answered once, but it costs a draft on a link that has just been lost."""
    return isinstance(request, Stream) and request.round == resumed.running
