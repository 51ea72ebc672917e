"""The verifier's side of a session, without I/O or clock: a token log, and rounds that settle once.

    session = ServerSession(message, limits, eos_ids=eos_ids, max_context=8192)
    session.open(message)               [Opened], also for a repetition
    session.append(message)             [Opened, PREFILL]
    session.stream(message, arrived)    [Run], [PREFILL] for one that waits for guesses, or its answer once more
    session.foresee(message, arrived)   [Run] if a waiting stream goes on with these guesses
    session.cancel(round)               [StreamTokens] if a waiting stream ends with it
    session.resume(message)             [Resumed]
    session.stream_on(answer, now)      nothing: the engine's tokens join the log, and go to the edge as they are
    session.wait(report, now)           [Run] if guesses have come meanwhile

Each verb returns messages for the edge and work for the engine, in order; `Service` carries them out. A request is run
once: repeated while it runs it has no answer, repeated afterwards it gets the same answer. So messages may be lost or
sent twice without changing the log. The edge's side is `moa/wire/session.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import structs

from cloud_verifier.engine.contract import Waiting
from cloud_verifier.engine.job import USUAL_COST, Guesses, Job, Lease
from cloud_verifier.sessions.outbox import Outbox
from cloud_verifier.sessions.record_sender import OutgoingRecords
from moa.errors import ConfigError
from moa.grammar.matcher import MATCHER_BYTES, Matcher
from moa.logprobs import row_bytes
from moa.sampling import SamplingSettings
from moa.wire.codec import chain_hash
from moa.wire.codes import Code, Refusal
from moa.wire.finish import TurnRules
from moa.wire.limits import Limits
from moa.wire.messages import (
    Append,
    ChatMessage,
    Finish,
    Foresee,
    Message,
    Open,
    Opened,
    Penalties,
    Progress,
    RecordDtype,
    Resume,
    Resumed,
    RowRange,
    Sampling,
    Stream,
    StreamTokens,
)
from moa.wire.ranges import Ranges

State = Literal["live", "detached", "cold"]
PROGRESS_SECONDS = 0.5
"""After so long without a sign the edge is told that its round is being worked on."""
_REPEATED_BYTES = 128 * 1024
"""Most bytes of log-probabilities in a repeated answer; those of older tokens are left out."""
BYTES_PER_TOKEN = 40
"""A Python int and its place in a list."""
_BYTES_PER_SESSION = 4096
"""A session without its log."""
_BYTES_PER_MESSAGE = 256
"""The object, its role, and what a text takes beside its characters."""
_BYTES_PER_RUN = 80
"""A range of held rows: two Python ints and their places."""
_USUAL_RUNS = 8
"""Ranges of held rows that `_BYTES_PER_SESSION` includes: records come and go between two rounds,
and a round that was admitted within the budget must not be found beyond it for that."""
_MAX_HELD_RUNS = 512
"""Ranges of held rows that are kept of what a device says it holds; others are sent again."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The slot is to hold the log's tokens before the pending one."""


PREFILL: Final = Prefill()


@dataclass(frozen=True, slots=True)
class Run:
    """The running round is to be queued; its request, or its first guesses, arrived at this time."""

    arrived: float


Output = Message | Prefill | Run


class ServerSession:
    """One session as the verifier sees it."""

    def __init__(
        self,
        message: Open,
        limits: Limits,
        *,
        eos_ids: frozenset[int],
        max_context: int,
        principal: str = "",
        features: Collection[str] = (),
        now: float = 0.0,
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher` follows the message's grammar."""
        self.id = message.session
        self.principal = principal
        self._limits = limits
        self.log = list(message.ids)
        self.round_number = message.round
        """The number of the last settled round."""
        self.running: Stream | None = None
        """The request of the round that is not settled yet."""
        self.sampling = sampling_settings(message.sampling, message.penalties)
        self._hears_progress = "progress" in features
        self._told_progress_at = now
        self.used = now
        """When the edge or the engine last did something for it."""
        self.outbox: Outbox | None = None
        """Where its answers go; None while detached."""
        self.lease: Lease | None = None
        """Its claim on a slot, which the table gives and takes."""
        self.job: Job | None = None
        """Work that is queued or runs; none while a stream waits for guesses."""
        self.guesses: Guesses | None = None
        """The edge's guesses for the running stream."""
        self.counted = 0
        """Bytes that the table has counted for this session."""
        self.records = OutgoingRecords(self.id, self.log)
        self._tells_messages = "messages" in features
        self._eos_ids = eos_ids
        self._max_context = max_context
        self._opened = (len(self.log), chain_hash(self.log))
        """Length and hash of the prompt that the session was opened with."""
        self._appended: tuple[int, int] | None = None
        """Position and length of what the latest turn began with."""
        self._settled: tuple[Stream, StreamTokens] | None = None
        """The last settled round and its whole answer, for a repetition."""
        self._may_wait = True
        """Whether a stream may wait for guesses."""
        self.want_records(message.records, message.record_rate, message.held, features)
        self._begin_turn(message, len(self.log) - message.generated, matcher)

    def _begin_turn(self, message: Open | Append, start: int, matcher: Matcher | None) -> None:
        """Take over what a message says of the turn that it begins. The turn's answer begins at
        position `start`, and `matcher` follows its grammar."""
        self.finish: Finish = ""
        """Why the turn's answer is over; empty while it is not."""
        self.logprobs = message.logprobs
        """Number of likeliest tokens with log-probabilities in this turn; -1: none."""
        self._rows = bytearray()
        """Log-probabilities of the log's last tokens."""
        self.matcher = matcher
        """Follows the grammar of the turn's answer."""
        self.grammar = message.grammar
        self.messages: Sequence[ChatMessage] = message.messages if self._tells_messages else ()
        """The conversation of the turn, where device and verifier have agreed that it is told."""
        self.message_bytes = message_bytes(self.messages)
        self.rules = TurnRules(
            start=start,
            max_new_tokens=message.max_new_tokens,
            max_context=self._max_context,
            eos_ids=frozenset() if message.ignore_eos else self._eos_ids,
            stop=tuple(message.stop),
        )

    # ---- state

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.log) - 1

    @property
    def state(self) -> State:
        """Whether it has a connection (live), else a slot (detached), or neither (cold)."""
        if self.outbox is not None:
            return "live"
        if self.lease is not None:
            return "detached"
        return "cold"

    @property
    def at_rest(self) -> bool:
        """Whether no work of it is queued or runs: between two rounds, or in a stream that waits
        for guesses."""
        return self.running is None or self._waiting

    @property
    def log_bytes(self) -> int:
        """Approximate memory of the session."""
        size = _BYTES_PER_SESSION + self.message_bytes
        size += BYTES_PER_TOKEN * len(self.log) + len(self._rows)
        size += _BYTES_PER_RUN * max(0, self.records.held.runs - _USUAL_RUNS)
        if self.matcher is not None:
            size += MATCHER_BYTES
        return size

    @property
    def next_tokens(self) -> int:
        """Tokens that the running round's next forward may write into the slot."""
        return self._limits.max_tree_nodes if self.running is not None else 0

    @property
    def next_bytes(self) -> int:
        """Bytes that the log must have room to grow by for the running round to run."""
        return BYTES_PER_TOKEN if self.running is not None else 0

    # ---- the connection

    def attach(self, outbox: Outbox) -> None:
        """Send answers and records there from now on; another connection loses the session."""
        if self.outbox is not outbox:
            self.detach()
        outbox.attach(self.records)
        self.outbox = outbox

    def detach(self) -> None:
        """Send answers nowhere."""
        if self.outbox is not None:
            self.outbox.detach(self.records)
        self.outbox = None

    def want_records(
        self,
        dtype: RecordDtype,
        rate: int,
        held: Iterable[RowRange] | None,
        features: Collection[str],
    ) -> None:
        """Send activation records in this precision and at this rate, but for those at the
        positions that the device says it holds. Of these positions only those in the log count, and
        a bounded number of ranges."""
        self.records.dtype = dtype if "records" in features else "off"
        self.records.limit(rate)
        if held is not None:
            ranges = Ranges(held)
            ranges.truncate(len(self.log))
            ranges.keep_newest(_MAX_HELD_RUNS)
            self.records.held = ranges

    # ---- from the edge

    def open(self, message: Open) -> list[Output]:
        """Answer an opening. It may be a repetition by a device that has heard of nothing: then it
        is told what the running round has brought, because the rest of that comes as soon as this
        connection has the session, maybe before the device has asked for the round again."""
        if (len(message.ids), chain_hash(message.ids)) != self._opened:
            raise Refusal(Code.CONFLICT, "a session of this id is open with another prompt")
        opened = Opened(self.id, len(message.ids), self.records.epoch)
        return [opened, *self._brought_so_far()]

    def append(self, message: Append, matcher: Matcher | None = None) -> list[Output]:
        """Start the next turn: its prompt joins the log, and runs if the session has a slot.
        `matcher` follows the answer's grammar; a repetition of the message changes nothing."""
        ids = message.ids
        base = message.base
        answer = Opened(self.id, base + len(ids), self.records.epoch)
        is_repeated = self._appended == (base, len(ids)) and self.log[base : base + len(ids)] == ids
        if is_repeated:
            return [answer]
        self._check_append(base, len(ids))
        self._appended = (base, len(ids))
        self.log += ids
        self._begin_turn(message, len(self.log), matcher)
        return [answer, PREFILL] if self.lease is not None else [answer]

    def _check_append(self, base: int, tokens: int) -> None:
        """A `Refusal` if no turn may begin now, or not with so many tokens at position `base`."""
        if self.running is not None:
            raise Refusal(
                Code.CONFLICT, f"round {self.running.round} is running: cancel it or wait"
            )
        if base != len(self.log):
            raise Refusal(
                Code.CONFLICT, f"append at {base}, but the log has {len(self.log)} tokens"
            )
        if base + tokens > self.rules.max_context:
            raise Refusal(
                Code.LIMIT,
                f"{base + tokens} tokens in the context, at most {self.rules.max_context}",
                limit="max_context_tokens",
            )

    def stream(
        self, message: Stream, arrived: float, *, most_guesses: float = math.inf
    ) -> list[Output]:
        """Begin the round that this message asks for, in which the engine streams tokens to the end
        of the answer. A request that was heard before begins nothing: its answer is sent again. At
        first a forward runs at most so many guesses."""
        if message == self.running:
            return self._brought_so_far()
        if self.running is None and self._settled is not None:
            last_request, last_answer = self._settled
            if message == last_request:
                return [last_answer]
        self._check_stream(message)
        self.running = message
        self.guesses = Guesses(message.waits, most_guesses)
        if self.guesses.waits:
            # The round's forwards wait for the device's guesses. Meanwhile the prompt can run.
            return [PREFILL]
        return [Run(arrived)]

    def _check_stream(self, message: Stream) -> None:
        """A `Refusal` if no round may begin now, or not the one that this message asks for. Rounds
        are numbered one by one, and each begins behind the log's last token."""
        if self.running is not None:
            raise Refusal(Code.CONFLICT, f"round {self.running.round} is still running")
        if message.round != self.round_number + 1:
            raise Refusal(Code.CONFLICT, f"round {message.round} after round {self.round_number}")
        if self.finish:
            raise Refusal(Code.CONFLICT, f"the turn is over ({self.finish}): append first")
        if message.base != self.base:
            raise Refusal(
                Code.CONFLICT, f"base {message.base}, but the pending token is at {self.base}"
            )

    def _brought_so_far(self) -> list[Output]:
        """Returns the tokens of the running round as an answer, if there are any: a device that asks
        again may have lost its connection before it heard of them."""
        if self.running is None:
            return []
        answer = self._all_tokens(self.running)
        return [answer] if answer.tokens else []

    def _all_tokens(self, stream: Stream, *, done: bool = False) -> StreamTokens:
        """Returns all tokens that a round has brought as one answer; `done` says whether it is over."""
        tokens = self.log[stream.base + 1 :]
        return StreamTokens(
            session=self.id,
            round=stream.round,
            base=stream.base,
            tokens=tokens,
            done=done,
            finish=self.finish if done else "",
            logprobs=self._last_rows(len(tokens)),
        )

    def foresee(self, message: Foresee, arrived: float) -> tuple[list[Output], bool]:
        """Take the device's guesses at what its running stream will bring. Returns what is to be
        done now, and whether the message counts as work. Guesses for another round are ignored."""
        if self.guesses is None or self.running is None or self.running.round != message.round:
            return [], False
        counts_as_work = self.guesses.add(message)
        outputs: list[Output] = [Run(arrived)] if self._waiting else []
        return outputs, counts_as_work

    def cancel(self, round: int) -> list[Output]:
        """Stop the round: a running one ends with its next answer, one that waits for guesses at
        once."""
        if self.running is None or self.running.round != round:
            return []
        if self.job is not None:
            self.job.cancelled = True
        return self.stop_waiting()

    def abandon(self) -> list[Output]:
        """Stop the running round, because its connection is gone."""
        if self.running is None:
            return []
        return self.cancel(self.running.round)

    def resume(self, message: Resume) -> list[Output]:
        """Answer a device that comes back on a new connection with the tokens that it has missed; a
        `Refusal` if its log is another one. A session that has lost its KV cache runs its text once
        more."""
        if (
            message.length > len(self.log)
            or chain_hash(self.log[: message.length]) != message.chain
        ):
            raise Refusal(Code.CONFLICT, "the logs differ: open the session anew")
        answer = Resumed(
            session=self.id,
            outcome="resumed" if self.lease is not None else "reprefilled",
            length=len(self.log),
            round=self.round_number,
            tail=self.log[message.length :],
            finish=self.finish,
            running=self.running.round if self.running is not None else 0,
            epoch=self.records.epoch,
            logprobs=self._last_rows(len(self.log) - message.length),
        )
        return [answer] if self.lease is not None else [answer, PREFILL]

    # ---- to and from the engine

    def as_job(self, lease: Lease, arrived: float) -> Job:
        """Returns the running round as a job for the engine. `arrived` is when its request came, or
        the first guesses that it waited for."""
        if self.running is None or self.guesses is None:
            raise RuntimeError("no round is running")
        cost = USUAL_COST  # tokens of its forward, about
        if self.guesses.waits:
            cost = min(self._limits.max_tree_nodes, 1 + self.guesses.nodes)
        has_sent_tokens = self.base > self.running.base
        return Job(
            lease=lease,
            request=self.running,
            ids=list(self.log),
            rules=self.rules,
            sampling=self.sampling,
            enqueued=arrived,
            deadline=float("inf") if has_sent_tokens else arrived + self._limits.request_seconds,
            logprobs=self.logprobs,
            guesses=self.guesses,
            matcher=self.matcher,
            cost=cost,
            messages=self.messages,
            grammar=self.grammar,
        )

    def give_up(self) -> None:
        """Forget the running round; where it was not run (deadline, no room), its number may be
        used again."""
        self.running = None
        self.job = None
        self.guesses = None

    def stop_waiting(self, *, for_good: bool = False) -> list[Output]:
        """End a stream that waits for guesses, with the tokens that it has sent. `for_good` says
        that no stream may wait from now on."""
        self._may_wait = self._may_wait and not for_good
        if self.running is None or not self._waiting:
            return []
        end = StreamTokens(self.id, self.running.round, self.base, [], done=True)
        self.stream_on(end, self.used)
        return [end]

    def stream_on(self, answer: StreamTokens, now: float) -> None:
        """Add the new tokens of the running stream to the log. If the answer says that the round is
        over, keep all of its tokens, in case the device asks for them again."""
        stream = self.running
        if stream is None or answer.round != stream.round:
            raise Refusal(Code.CONFLICT, "no stream round is running")
        if answer.tokens and answer.base != self.base:
            raise Refusal(
                Code.CONFLICT,
                f"tokens after position {answer.base}, but the log ends at {self.base}",
            )
        self.used = now
        if answer.tokens and self.guesses is not None:
            self.guesses.advanced()
        self.log += answer.tokens
        self._rows += answer.logprobs
        self.finish = answer.finish
        if answer.done:
            self.round_number = stream.round
            self.give_up()
            self._settled = (stream, self._all_tokens(stream, done=True))

    def wait(self, report: Waiting, now: float) -> list[Output]:
        """Note that the running stream has no guess to verify: it waits, ends, or runs with guesses
        that have come meanwhile."""
        if report.job.base != self.base:  # the engine's copy of the log is longer than ours
            raise Refusal(Code.CONFLICT, "tokens of this stream were lost in the engine")
        self.job = None
        if report.job.cancelled or not self._may_wait:
            return self.stop_waiting()
        if self.guesses is not None and self.guesses.waiting:
            return [Run(now)]
        return []

    def progress(self, read: int, now: float) -> Progress | None:
        """Returns that so many tokens are read for the running round, as a message for a device
        that has heard nothing for long; None if there is nothing to say."""
        if self.running is None or self.job is None or self.outbox is None:
            return None
        heard_at = max(self.used, self._told_progress_at)
        if not self._hears_progress or now - heard_at < PROGRESS_SECONDS:
            return None
        self._told_progress_at = now
        return Progress(self.id, self.running.round, min(read, self.base), self.base)

    # ---- helpers

    @property
    def _waiting(self) -> bool:
        """Whether a stream runs that waits for guesses."""
        return self.running is not None and self.job is None and self.guesses is not None

    def _last_rows(self, tokens: int) -> bytes:
        """Returns the log-probabilities of the last `tokens` tokens, packed, as far as they are
        known and fit into one answer."""
        bytes_per_token = row_bytes(self.logprobs)
        if not bytes_per_token:  # nobody has asked for log-probabilities
            return b""
        tokens = min(tokens, _REPEATED_BYTES // bytes_per_token)
        start = max(0, len(self._rows) - bytes_per_token * tokens)
        return bytes(self._rows[start:])


def message_bytes(messages: Sequence[ChatMessage]) -> int:
    """Approximate memory of a conversation: a text takes up to four bytes a character."""
    return sum(_BYTES_PER_MESSAGE + 4 * len(message.content) for message in messages)


def sampling_settings(wire: Sampling, penalties: Penalties | None) -> SamplingSettings:
    """Returns the sampling settings of a message as ours; a `Refusal` if one is out of range."""
    more = penalties or Penalties()
    try:
        return SamplingSettings(
            **structs.asdict(wire),
            frequency_penalty=more.frequency,
            presence_penalty=more.presence,
            logit_bias=tuple(more.bias),
        )
    except ConfigError as error:
        raise Refusal(Code.BAD_MESSAGE, str(error)) from None
