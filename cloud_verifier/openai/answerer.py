"""Answers from the verifier's own engine: a session like a device's, whose stream the server
drafts; a text that the caller predicts goes up as guesses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Gauge

from cloud_verifier.openai.resting import RestingSessions
from cloud_verifier.serving.conversation import converse
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.service import Service
from moa.api.answer import (
    SAMPLING_FIELDS,
    AnswerEvent,
    AnswerRequest,
    Began,
    Counts,
    Encoded,
    Ended,
    Piece,
    Reading,
    Scored,
)
from moa.api.encoding import answer_limit, encoded
from moa.api.errors import stopping
from moa.api.fairness import charged
from moa.api.logprobs import scored
from moa.chat.template import ChatTemplate
from moa.errors import CapacityError, MoaError, RemoteError, UsageError
from moa.sampling import SamplingSettings
from moa.speculation.prediction import Prediction
from moa.text_stream import TextStream, text_after
from moa.wire import (
    FEATURES,
    PROTOCOL_VERSIONS,
    ClientSession,
    Refusal,
    decode_server,
    encode,
    remote_error,
)
from moa.wire.codes import Code
from moa.wire.events import Advanced, Ready, Recovered, Refused, Working
from moa.wire.limits import Limits
from moa.wire.messages import (
    ClientMessage,
    Error,
    Foresee,
    Goaway,
    Hello,
    ServerMessage,
    Welcome,
)
from moa.wire_sampling import wire_sampling

E = TypeVar("E", Ready, Advanced)
_DEFAULT_TOKENS = 0
"""Of an answer whose length nobody asks for: until the model ends it."""
_REFUSED_SECONDS = 60.0
"""So long the service may refuse an answer's requests for now; then the client gets its refusal."""
_MOST_LOSSES = 3
"""So many times in a row a session is opened again that the service has dropped."""


class Tokenizer:
    """The target's own tokenizer and chat template. Threads encode, one at a time; decoding waits
    for none of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._templates: dict[str, ChatTemplate] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the tokenizer's start token."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def plain(self, text: str) -> list[int]:
        """Ids of a piece from the middle of a text."""
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def template(self) -> str:
        """The chat template's source."""
        return str(self._tokenizer.chat_template or "")

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """Render a conversation by the target's chat template, which may read the values of
        `template`. A template is a program that came with the model: it runs in a process of its
        own, so that one that does not end stops no server."""
        if self._tokenizer.chat_template is None:
            raise UsageError("this target has no chat template", hint="use /v1/completions")
        special = self._tokenizer.special_tokens_map
        return self._template_for(template.get("tools")).render(messages, special, template)

    def _template_for(self, tools: Any) -> ChatTemplate:
        """Returns the chat template for conversations with or without tools: a few models have
        two."""
        try:
            source = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise UsageError(f"this target has no such chat template: {error}") from None
        with self._lock:
            if source not in self._templates:
                self._templates[source] = ChatTemplate(source, "of this target")
            return self._templates[source]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class VerifierAnswerer:
    """Answers for a verifier's endpoint: all text is the target's, so nothing is provisional."""

    def __init__(self, service: Service, tokenizer: Tokenizer, model: str, wrong: Any) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._model = model
        self._wrong = wrong
        self._resting = RestingSessions(service.table, service.facts.slots)

    @property
    def model(self) -> str:
        """The target's name."""
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        return self._tokenizer

    @property
    def context(self) -> int:
        """The service's limit."""
        return self._service.max_context

    @property
    def vocabulary(self) -> int:
        """The target's."""
        return self._service.facts.vocab_size

    def status(self) -> dict[str, Any]:
        """Always online."""
        return {"link": "online", "detail": "", "rtt_ms": 0.0}

    def not_ready(self) -> str:
        """Why no answer can be given now, in a word; empty if one can."""
        if self._service.draining:
            return "draining"
        return str(self._wrong())

    async def unverified(self) -> str:
        """Never: all text is the target's."""
        return ""

    async def encode(self, ask: AnswerRequest) -> Encoded:
        """Returns a request's prompt in tokens, with what goes with it; an error if it is too
        long."""
        limits = self._service.limits
        context = self._service.max_context
        limit = ""
        if limits.max_prompt_tokens + 1 < context:
            context = limits.max_prompt_tokens + 1
            limit = "max_prompt_tokens"
        return await encoded(
            self._tokenizer,
            ask,
            context=context,
            limit=limit,
            vocabulary=self._service.facts.vocab_size,
            longest=answer_limit(ask, _DEFAULT_TOKENS, limits.max_new_tokens),
        )

    async def admit(self, ask: AnswerRequest, encoded: Encoded) -> None:
        """Compile the answer's grammar, if it has one, before the answer begins; an error if it
        cannot be compiled, or if this process is about to stop. The result is kept for the answer's
        session."""
        try:
            self._service.check_goes_on()
            if encoded.grammar is None:
                return
            await self._service.matcher(
                ask.principal, encoded.grammar, len(encoded.ids), encoded.ids
            )
        except Refusal as refused:
            raise _as_exception(refused.error()) from None

    async def answer(
        self, ask: AnswerRequest, encoded: Encoded
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of one answer, from a session of its own. If the caller stops early, the
        session's round is cancelled. The session rests behind its answer, for the next question of
        the same chat."""
        session = session_for(ask, encoded, self._service.limits)
        earlier = self._resting.leave_room(ask.principal, encoded.ids)
        failed = False
        try:
            async with connected(self._service, ask.principal, ask.peer) as line:
                try:
                    async for event in self._events(ask, session, encoded, line):
                        yield event
                except Exception:
                    failed = True
                    raise
                finally:
                    cancel = session.cancel()
                    if cancel is not None:
                        line.put(cancel)
                    if failed:
                        line.put(session.close())
        finally:
            self._resting.rest(ask.principal, session.id, instead=earlier)

    async def _events(
        self, ask: AnswerRequest, session: ClientSession, encoded: Encoded, line: Loopback
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Open a session over `line`, ask for streams until the answer has ended, and yield what
        they bring as events of the API."""
        prompt_length = len(session.log)
        text = TextStream(self._tokenizer, ask.stop)
        predicted = _Predicted(session, encoded.prediction, self._service.limits)
        forwards = 0
        exchange = _Exchange(session, line, predicted, self._service.metrics.waiting_answers)
        line.put(session.open())
        # A stream asked for at the same time would also be refused without a slot.
        await exchange.next(Ready)
        # Not sooner: one that waits for a place can still be refused with a status, and a balancer
        # asks another replica then.
        yield Began(encoded.thinking)
        while not session.finish:
            exchange.ask()
            advanced = await exchange.next(Advanced)
            if isinstance(advanced, Working):
                if advanced.done < advanced.total:
                    yield Reading(advanced.done, advanced.total)
                continue
            predicted.decided(advanced.tokens)
            forwards += bool(advanced.tokens)
            for piece in self._pieces(session, text, advanced):
                yield piece
        text.flush()
        tokens = len(session.log) - prompt_length
        counts = Counts(
            prompt_tokens=prompt_length,
            tokens=tokens,
            calls=exchange.streams,
            forwards=forwards,
            forward_tokens=tokens,
            predicted=predicted.offered,
            predicted_accepted=predicted.accepted,
        )
        yield Ended(reason=session.finish, verified=True, text=text.text, counts=counts)

    def _pieces(
        self, session: ClientSession, text: TextStream, advanced: Advanced
    ) -> Iterator[Piece]:
        """Yield the text of each new token, with its log-probabilities, and add it to `text`. A
        token may have no text yet, because it is only a part of a character."""
        for position, token in enumerate(advanced.tokens, advanced.base + 1):
            piece = text.add(token)
            entries = self._scored(session, position)
            if piece or entries:
                yield Piece(piece, logprobs=entries)

    def _scored(self, session: ClientSession, position: int) -> tuple[Scored, ...]:
        """Returns the log-probabilities of the token at this position, in a tuple; an empty one if
        they were not asked for, or the token ends the answer."""
        logprobs = session.token_logprobs.get(position)
        token = session.log[position]
        if logprobs is None or token in self._service.facts.eos_ids:
            return ()
        before = session.log[position - 1 : position]
        # A token's text depends on the one before it: a space in front of a word, for example.
        return (scored(logprobs, token, partial(text_after, self._tokenizer, before)),)


def session_for(ask: AnswerRequest, encoded: Encoded, limits: Limits) -> ClientSession:
    """Returns a session with the settings of this request, within the service's limits."""
    sampling, penalties = wire_sampling(_sampling(ask))
    return ClientSession(
        list(encoded.ids),
        max_new_tokens=answer_limit(ask, _DEFAULT_TOKENS, limits.max_new_tokens),
        sampling=sampling,
        penalties=penalties,
        stop=list(ask.stop),
        ignore_eos=bool(ask.ignore_eos),
        records="off",
        logprobs=-1 if ask.logprobs is None else ask.logprobs,
        grammar=encoded.grammar,
    )


class _Predicted:
    """The text that the caller predicts, as guesses for the session's stream."""

    def __init__(self, session: ClientSession, tokens: Sequence[int], limits: Limits) -> None:
        self.offered = 0
        """Tokens that the engine was told."""
        self.accepted = 0
        self._session = session
        self._start = len(session.log)
        self._prediction = Prediction(tokens)
        self._any = bool(tokens)
        self._most = limits.max_guess_tokens - 1

    def begins(self) -> bool:
        """Begin with a new stream, which has been told nothing; returns whether it is to wait for
        guesses, because there are some."""
        self._prediction.told = []
        if not self._any:
            return False
        return len(self._prediction.after(self._output, self._room)) > 0

    def news(self) -> list[Foresee]:
        """Returns the message with predicted tokens that the running stream has not been told, in a
        list; an empty list if there is nothing new."""
        if not self._any:
            return []
        told_before = len(self._prediction.told)
        guesses = self._prediction.tell(self._output, self._room)
        if not guesses:
            return []
        self.offered += len(guesses) - told_before
        return [self._guess(guesses)]

    def _guess(self, tokens: Sequence[int]) -> Foresee:
        """Returns a message with these tokens as guesses behind the log's last one, each as a
        certain one. It also tells the stream that it need not wait for others."""
        chain = [self._session.log[-1], *tokens]
        return self._session.foresee(
            tokens=chain,
            parents=range(-1, len(tokens)),
            neg_log_probs=[0] * len(chain),
            waits=False,
        )

    def decided(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        self.accepted += self._prediction.decided(tokens)

    def again(self) -> list[Foresee]:
        """Returns the messages for a stream that was sent again, and so has been told nothing: the
        predicted tokens, or, if there are none any more, that it need not wait for any."""
        self._prediction.told = []
        stream = self._session.streaming
        if stream is None:
            return []
        messages = self.news()
        if not messages and stream.waits:
            messages = [self._guess([])]
        return messages

    @property
    def _output(self) -> list[int]:
        return self._session.log[self._start :]

    @property
    def _room(self) -> int:
        """How many guesses can be told now: as many as a message may have, and as the answer may have
        tokens, without its last one, which comes without a guess."""
        left = self._session.max_new_tokens - (len(self._session.log) - self._start)
        return max(0, min(self._most, left - 1))


class Loopback:
    """The client's end of an in-memory connection to this process, with the same limits, fairness
    and metrics as a socket; `converse` has the other one. The queue is bounded by the answer's
    length."""

    def __init__(self, service: Service, peer: str) -> None:
        """`peer` is the address of the client for whom this is, for the log."""
        self.peer = peer
        self.meter = Meter(service.limits, service.clock())
        self.flooded: Callable[[str], None] = lambda limit: None
        self.arrived = 0.0
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._why = ""

    # ---- the methods that `converse` uses

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while (frame := await self._up.get()) is not None:
            yield frame

    async def send(self, frame: bytes, /) -> None:
        """To us."""
        self._down.put_nowait(frame)

    async def close(self, code: int, reason: str) -> None:
        """Close both directions."""
        self._why = reason
        self.abort()

    def abort(self) -> None:
        """The same, at once."""
        self._up.put_nowait(None)
        self._down.put_nowait(None)

    # ---- the client's methods

    def put(self, message: ClientMessage) -> None:
        """To the service."""
        self.arrived = time.monotonic()
        self._up.put_nowait(encode(message))

    async def get(self) -> ServerMessage:
        """From the service."""
        frame = await self._down.get()
        if frame is None:
            raise CapacityError(f"the verifier ended the connection: {self._why or 'no reason'}")
        return decode_server(frame)


@contextlib.asynccontextmanager
async def connected(service: Service, principal: str, peer: str) -> AsyncIterator[Loopback]:
    """Yield a connection of this principal, whose client has the address `peer`, to the service in
    this process, after hello and welcome. When the body ends, it is closed and its end waited
    for."""
    refusal = service.no_room(principal)
    if refusal is not None:
        raise _as_exception(refusal.error())
    line = Loopback(service, peer)
    task = asyncio.create_task(charged(converse(service, line, principal, is_local=True)))
    try:
        line.put(
            Hello(versions=list(PROTOCOL_VERSIONS), features=sorted(FEATURES), client="openai")
        )
        match await line.get():
            case Welcome():
                yield line
            case Error() as error:
                raise _as_exception(error)
            case other:
                raise RemoteError("internal", f"the verifier began with {type(other).__name__}")
    finally:
        line.abort()
        await asyncio.gather(task, return_exceptions=True)


class _Exchange:
    """A session's requests and their answers over one connection."""

    def __init__(
        self, session: ClientSession, line: Loopback, predicted: _Predicted, waiting: Gauge
    ) -> None:
        self._session = session
        self._waiting = waiting
        """Answers that wait for room, by limit."""
        self._line = line
        self._predicted = predicted
        self._progress = time.monotonic()
        self._losses = 0
        self._has_place = False
        """Whether the service has taken the session in."""
        self._kept: deque[ServerMessage] = deque()
        """What the service has said while the session waited to ask again."""
        self.streams = 0
        """Streams that were asked for."""

    def ask(self) -> None:
        """Ask for a stream if none runs, which is the first one, or goes on after one that was ended
        before the answer. Tell it the predicted tokens that it has not been told."""
        if not self._session.busy:
            self.streams += 1
            self._line.put(self._session.stream(waits=self._predicted.begins()))
        for message in self._predicted.news():
            self._line.put(message)

    async def next(self, kind: type[E]) -> E | Working:
        """Wait for the session's next event of this kind, or for the news that the service works on
        it.

        What was refused for now is sent again, and a session that the service has dropped is opened
        again; after some time or some losses the service's refusal is raised.
        """
        with contextlib.ExitStack() as waits:
            while True:
                message = await self._next_message()
                event = self._session.receive(message)
                waits.close()  # it may wait for something else by now, or not at all
                if isinstance(event, Working):
                    self._progress = time.monotonic()
                    return event
                if isinstance(event, kind):
                    self._has_place = True
                    self._progress = time.monotonic()
                    self._losses = 0
                    return event
                if isinstance(event, Recovered):
                    self._count_loss(message)
                    self._ask_again()
                elif isinstance(event, Refused):
                    for_what = event.error.limit or event.error.code
                    waits.enter_context(self._waiting.labels(for_what).track_inprogress())
                    await self._sit_out(event)
                    self._ask_again()
                # Anything else is a repetition, or an event of another kind.

    def _count_loss(self, message: ServerMessage) -> None:
        """Count that the service has dropped the session; after too many times in a row, raise the
        refusal that says so."""
        self._losses += 1
        if self._losses > _MOST_LOSSES and isinstance(message, Error):
            raise _as_exception(message)

    async def _sit_out(self, refused: Refused) -> None:
        """Wait until a request that was refused may be sent again; raise the refusal if it never
        may, or if nothing has come of the session for long."""
        # A device would ask another verifier; from here there is no way to one.
        is_stopping = refused.error.code == Code.DRAINING
        is_late = time.monotonic() - self._progress > _REFUSED_SECONDS
        if is_stopping or is_late or not refused.retry:
            raise _as_exception(refused.error)
        await self._pause(max(0.01, refused.retry_after))

    async def _pause(self, seconds: float) -> None:
        """Wait for so long. What the service says meanwhile is kept for later, unless it stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    self._kept.append(await self._hear())

    async def _hear(self) -> ServerMessage:
        """Wait for the service's next message. Raises if the service stops before this answer has a
        place at the model: whoever asked for it can ask another server. An answer that has one is
        written to its end; the drain waits for it."""
        while isinstance(message := await self._line.get(), Goaway):
            if not self._has_place:
                raise stopping()
        return message

    async def _next_message(self) -> ServerMessage:
        """Wait for the next message of the service that is about the session."""
        while True:
            message = self._kept.popleft() if self._kept else await self._hear()
            if getattr(message, "session", None) != self._session.id:
                raise MoaError(f"unexpected message {type(message).__name__} for another session")
            if isinstance(message, Error) and message.round and self._session.opening:
                # Of a round that was sent behind the opening, whose own answer counts.
                continue
            return message

    def _ask_again(self) -> None:
        """Send the requests again that have no answer, with the guesses for them."""
        for request in self._session.unsettled:
            self._line.put(request)
        for guesses in self._predicted.again():
            self._line.put(guesses)


def _as_exception(error: Error) -> MoaError:
    """The exception for a refusal of the service. That it stops, the API has an error of its own
    for."""
    return stopping() if error.code == Code.DRAINING else remote_error(error)


def _sampling(ask: AnswerRequest) -> SamplingSettings:
    """The sampling settings of a request, with our defaults for what it leaves out; an error names
    the field that is out of range."""
    given = {}
    for name in SAMPLING_FIELDS:
        value = getattr(ask, name)
        if value is not None:
            given[name] = value
    return SamplingSettings(**given)
