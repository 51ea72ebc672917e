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
    """Last settled round."""
    epoch: int = field(init=False, default=0)
    finish: Finish = field(init=False, default="")
    turn_start: int = field(init=False)
    token_logprobs: dict[int, TokenLogprobs] = field(init=False, default_factory=dict)
    """Log-probabilities of this turn's tokens, by position."""
    held: Ranges = field(init=False, default_factory=Ranges)
    unsettled: list[Request] = field(init=False, default_factory=list)
    """Requests without an answer yet, in order: at most an open or append, and a round."""

    _resuming: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.turn_start = len(self.log)

    def another(self, ids: Sequence[int]) -> ClientSession:
        """A new session that asks for the same, with this log."""
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
        """The stream under way."""
        return next((request for request in self.unsettled if isinstance(request, Stream)), None)

    @property
    def opening(self) -> bool:
        """Whether an opening has not been answered yet."""
        return any(isinstance(request, Open) for request in self.unsettled)

    def waits_for(self, round: int) -> bool:
        """Whether this round has not been answered yet."""
        return self.streaming is not None and self.streaming.round == round

    # ---- what to send

    def open(self) -> Open:
        """The first message of the session."""
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
        """The next turn. Its ids are added to the log at once."""
        self._not_busy()
        self.max_new_tokens = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        self.stop = self.stop if stop is None else list(stop)
        self.ignore_eos = self.ignore_eos if ignore_eos is None else ignore_eos
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
        """The next round: drafted by the server, decoded there without a draft, or only by guesses."""
        self._not_busy()
        return self._ask(Stream(self.id, self.round + 1, self.base, speculate, waits))

    def foresee(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        neg_log_probs: Sequence[int],
        waits: bool | None = None,
    ) -> Foresee:
        """What may come next in the running stream: a tree below the log's last token. Nothing
        waits for an answer."""
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
        """Stop the running round, if any; its answer still comes."""
        stream = self.streaming
        return Cancel(self.id, stream.round) if stream is not None else None

    def close(self) -> Close:
        """The last message of the session."""
        self.unsettled.clear()
        return Close(self.id)

    def recover(self) -> list[Request | Resume]:
        """What to send first on a new connection."""
        if not self.settled:
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
        """Handle a message of this session; None if it is a repetition."""
        match message:
            case Opened():
                return self._opened(message)
            case StreamTokens():
                return self._stream_tokens(message)
            case Progress():
                news = Working(message.done, message.total)
                return news if self.waits_for(message.round) else None
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
        request = next((r for r in self.unsettled if isinstance(r, Open | Append)), None)
        if request is None:
            return None
        if len(self.log) < message.length:
            raise ProtocolError(
                f"the server's log has {message.length} tokens, ours {len(self.log)}"
            )
        if message.length != (
            len(request.ids) if isinstance(request, Open) else request.base + len(request.ids)
        ):
            return None  # the answer to an earlier opening, once more
        self.unsettled.remove(request)
        self.settled = message.length
        self.epoch = message.epoch
        return Ready(message.length)

    def _stream_tokens(self, message: StreamTokens) -> Advanced | None:
        request = self.streaming
        if request is None or request.round != message.round:
            return None
        known = self.base - message.base
        if known < 0:
            raise ProtocolError(
                f"stream tokens at {message.base + 1}, but the log ends at {self.base}"
            )
        self._same(message.base + 1, message.tokens[:known])
        tokens = tuple(message.tokens[known:])
        self._check(tokens, len(self.log) + len(tokens))
        base = self.base
        self._tell(message.logprobs, len(self.log) + len(tokens))
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
        )

    def _resumed(self, message: Resumed) -> Recovered | None:
        if not self._resuming:
            return None
        self._resuming = False
        if message.outcome == "gone":
            return self._gone()
        if message.length != self.settled + len(message.tail):
            raise ProtocolError("the tail of a resumed session does not reach its length")
        self._check(message.tail, message.length)
        self._tell(message.logprobs, message.length)
        waiting: list[Request] = []
        base = self.settled - 1
        log = self.log[: self.settled] + message.tail
        for request in self.unsettled:
            if isinstance(request, Append):
                if message.length > request.base:
                    self._same(request.base, message.tail[: len(request.ids)])
                    base += len(request.ids)  # a prompt is no output
                else:
                    log = log + request.ids
                    waiting.append(request)
            elif isinstance(request, Stream) and message.round < request.round:
                waiting.append(request)
        tokens = tuple(log[base + 1 : message.length])
        self.log = log
        self.settled = message.length
        self.unsettled = waiting
        self.round = message.round
        # Else keep our own `finish`: a server that got the log again does not know the turn's end
        if message.tail:
            self.finish = message.finish
        # Resending a round that is still running is harmless (it is answered once) and needs no
        # special case, but it costs a draft on a link that has just been lost.
        resend = tuple(
            r for r in waiting if not (isinstance(r, Stream) and r.round == message.running)
        )
        self.epoch = message.epoch
        return Recovered(message.outcome, base, tokens, self.finish, resend)

    def _gone(self) -> Recovered:
        opening = self._open(self.log[: self.settled or len(self.log)])
        # A stream that has brought tokens goes on behind them: the other verifier is told them by
        # the opening.
        rounds = (
            replace(r, base=self.base) if isinstance(r, Stream) else r for r in self.unsettled
        )
        self.unsettled = [opening, *(r for r in rounds if not isinstance(r, Open))]
        return Recovered("gone", self.settled - 1, (), self.finish, tuple(self.unsettled))

    def _error(self, message: Error) -> Refused | Recovered:
        if message.code in (Code.UNKNOWN_SESSION, Code.QUARANTINED):
            return self._gone()
        retry = message.code in RETRYABLE
        if not retry:
            self.unsettled = [
                r for r in self.unsettled if message.round and round_of(r) != message.round
            ]
        return Refused(message, retry)

    # ---- helpers

    def _same(self, start: int, tokens: Sequence[int]) -> None:
        """Check that the server tells our own tokens again from position `start` on: else text with
        a hole follows."""
        if self.log[start : start + len(tokens)] != list(tokens):
            raise ProtocolError(f"the server's tokens from position {start} on differ from ours")

    def _tell(self, logprobs: bytes, stop: int) -> None:
        """Keep the log-probabilities of the tokens before position `stop`."""
        if logprobs:
            rows = unpack(logprobs, self.logprobs, self.vocab_size)
            if len(rows) > stop - self.turn_start:
                raise ProtocolError("log-probabilities of more tokens than there are")
            self.token_logprobs |= enumerate(rows, stop - len(rows))

    def _check(self, tokens: Sequence[int], length: int) -> None:
        """Check that an answer has only ids of the target's vocabulary, and no more tokens than
        asked for."""
        if tokens and max(tokens) >= self.vocab_size:
            raise ProtocolError(f"token id {max(tokens)} of a vocabulary of {self.vocab_size}")
        if length - self.turn_start > self.max_new_tokens:
            raise ProtocolError(f"more than the {self.max_new_tokens} tokens that were asked for")

    def _open(self, ids: Sequence[int]) -> Open:
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
        self.unsettled.append(request)
        return request

    def _not_busy(self) -> None:
        if self.busy:
            raise ProtocolError("a round is under way: wait for its answer, or cancel it")
