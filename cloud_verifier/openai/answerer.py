"""Answers from the verifier's own engine: a session like a device's, with server-drafted rounds."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, TypeVar

from cloud_verifier.openai.loopback import Loopback, connected
from cloud_verifier.sessions.service import Service
from moa.api.answer import AnswerEvent, AnswerRequest, Began, Counts, Ended, Piece, Scored
from moa.api.errors import bad
from moa.api.logprobs import scored
from moa.errors import MoaError, UsageError
from moa.sampling import SamplingSettings
from moa.speculation.prediction import Prediction
from moa.text_stream import TextStream, text_after
from moa.wire import ClientSession, remote_error
from moa.wire.events import Advanced, Ready, Refused
from moa.wire.messages import Sampling

E = TypeVar("E", Ready, Advanced)
_DEFAULT_TOKENS = 1024
_LOST = 16
"""After so many tokens outside of the prediction, the server drafts itself until the answer ends."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


class Tokenizer:
    """The target's own tokenizer and chat template. Used from several threads, one at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the tokenizer's start token."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def plain(self, text: str) -> list[int]:
        """Ids of a piece from the middle of a text."""
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat(self, ask: AnswerRequest) -> list[int]:
        """Ids of a conversation, up to the start of the answer."""
        with self._lock:
            if self._tokenizer.chat_template is None:
                raise UsageError("this target has no chat template", hint="use /v1/completions")
            try:
                messages = [dict(message) for message in ask.messages or ()]
                ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template is a program and may raise any exception
                raise UsageError(f"the chat template refuses this conversation: {error}") from None
            return list(ids)

    def decode(self, ids: Any) -> str:
        """Text of ids, without special tokens."""
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class VerifierAnswerer:
    """Answers for a verifier's endpoint: all text is the target's, so nothing is provisional."""

    def __init__(self, service: Service, tokenizer: Tokenizer, model: str, wrong: Any) -> None:
        self._service, self._tokenizer, self._model, self._wrong = service, tokenizer, model, wrong

    @property
    def model(self) -> str:
        """The target's name."""
        return self._model

    def status(self) -> dict[str, Any]:
        """Always online."""
        return {"link": "online", "detail": "", "rtt_ms": 0.0}

    def not_ready(self) -> str:
        """The model's problem, if any."""
        return "draining" if self._service.draining else str(self._wrong())

    async def answer(self, ask: AnswerRequest) -> AsyncGenerator[AnswerEvent, None]:
        """The events of one answer."""
        ids = await asyncio.to_thread(self._ids, ask)
        session = ClientSession(
            ids,
            max_new_tokens=ask.max_tokens or _DEFAULT_TOKENS,
            sampling=_sampling(ask),
            stop=list(ask.stop),
            ignore_eos=ask.ignore_eos,
            records="off",
            logprobs=-1 if ask.logprobs is None else ask.logprobs,
        )
        async with connected(self._service, ask.principal) as line:
            try:
                async for event in self._events(ask, session, line):
                    yield event
            finally:
                if (cancel := session.cancel()) is not None:
                    line.put(cancel)
                line.put(session.close())

    async def _events(
        self, ask: AnswerRequest, session: ClientSession, line: Loopback
    ) -> AsyncGenerator[AnswerEvent, None]:
        yield Began(len(session.log))
        start, text = len(session.log), TextStream(self._tokenizer, ask.stop)
        predicted = await asyncio.to_thread(self._tokenizer.plain, ask.prediction) if ask.prediction else []
        prediction, most = Prediction(predicted), self._service.limits.max_chain_tokens - 1
        calls = offered = accepted = 0
        lost = 0 if predicted else _LOST
        line.put(session.open())
        await _event(Ready, session, line)  # a round sent at the same time would also be refused if there is no slot
        while not session.finish:
            guess = prediction.after(session.log[start:], most) if lost < _LOST else []
            lost = 0 if guess else lost + 1
            line.put(session.verify([session.log[-1], *guess]) if lost < _LOST else session.stream())
            calls += 1
            done = False
            while not done:
                advanced = await _event(Advanced, session, line)
                done = advanced.done
                if guess:
                    offered, accepted = offered + len(guess), accepted + len(advanced.path) - 1
                    prediction.judged(len(advanced.path) - 1)
                for position, token in enumerate(advanced.tokens, advanced.base + 1):
                    piece, entries = text.add(token), self._scored(session, position)
                    if piece or entries:
                        yield Piece(piece, logprobs=entries)
        text.flush()
        counts = Counts(
            prompt_tokens=start,
            tokens=len(session.log) - start,
            calls=calls,
            predicted=offered,
            predicted_accepted=accepted,
        )
        yield Ended(reason=session.finish, verified=True, text=text.text, counts=counts)

    def _scored(self, session: ClientSession, position: int) -> tuple[Scored, ...]:
        """The log-probabilities of a token, when they were asked for and it does not end the answer."""
        told, token = session.token_logprobs.get(position), session.log[position]
        if told is None or token in self._service.facts.eos_ids:
            return ()
        before = session.log[position - 1 : position]
        return (scored(told, token, partial(text_after, self._tokenizer, before)),)

    def _ids(self, ask: AnswerRequest) -> list[int]:
        if ask.messages is not None:
            ids = self._tokenizer.chat(ask)
        else:
            ids = list(ask.ids) if ask.ids is not None else self._tokenizer.encode(ask.text or "")
        most = min(self._service.max_context - 1, self._service.limits.max_prompt_tokens)
        if not ids:
            raise UsageError("the prompt is empty")
        if len(ids) > most:
            raise bad(f"the prompt has {len(ids)} tokens, at most {most}", code="context_length_exceeded")
        if max(ids) >= self._service.facts.vocab_size:
            raise bad(f"the target has {self._service.facts.vocab_size} tokens; there is none with the id {max(ids)}")
        return ids


async def _event(kind: type[E], session: ClientSession, line: Loopback) -> E:
    """The next event of this kind; a request that was refused temporarily is repeated."""
    while True:
        message = await line.get()
        if getattr(message, "session", None) != session.id:
            raise MoaError(f"the verifier said {type(message).__name__} to a session of its own")
        event = session.receive(message)
        if isinstance(event, kind):
            return event
        if isinstance(event, Refused):
            if not event.retry:
                raise remote_error(event.error)
            await asyncio.sleep(max(0.01, event.retry_after))
            for request in session.unsettled:
                line.put(request)


def _sampling(ask: AnswerRequest) -> Sampling:
    given = {name: value for name in _SAMPLING if (value := getattr(ask, name)) is not None}
    return Sampling(**dataclasses.asdict(SamplingSettings(**given)))  # raises an error that names the field
