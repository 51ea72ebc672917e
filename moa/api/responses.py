"""`/v1/responses`: the text part of Open Responses. Requests, the response object, and stream events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moa.api import logprobs
from moa.api.answer import AnswerRequest, Counts, Ended, LinkNews, Note, Question
from moa.api.errors import ApiError, bad
from moa.api.present import Show
from moa.api.requests import (
    Content,
    Defaults,
    Extension,
    PositiveInt,
    PredictedContent,
    Role,
    Temperature,
    ToolChoice,
    TopP,
    answer_format,
    chat_role,
    content_text,
    decode,
    no_calls,
    predicted_text,
    sampling_seed,
    temperature,
    unsupported,
)
from moa.logprobs import MAX_TOP

ShortText = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


class Item(msgspec.Struct):
    """An item of the input: a message."""

    role: Role | None = None
    content: Content = None
    type: str = "message"


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/responses`."""

    model: ShortText | None = None
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=1024)]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    metadata: Metadata | None = None
    tool_choice: ToolChoice = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt: Any = None
    conversation: Any = None
    prediction: PredictedContent | None = None
    moa: Extension | None = None


StoredMessages = tuple[dict[str, str], ...]
_REPEATED = (
    *("previous_response_id", "instructions", "max_output_tokens"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log-probabilities."""


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request."""

    ask: AnswerRequest
    conversation: StoredMessages
    """The messages without the instructions, which a later request continues."""
    fields: dict[str, Any]
    """The fields of the response that repeat the request's."""
    stream: bool
    store: bool
    background: bool
    resumable: bool


def parse(body: bytes) -> ResponseRequest:
    """Check the parts of the request that do not depend on the earlier conversation."""
    request = decode(body, ResponseRequest)
    for name in ("presence_penalty", "frequency_penalty", "prompt", "conversation"):
        if getattr(request, name):
            raise unsupported(name)
    no_calls(request.tool_choice, "tool_choice")
    answer_format((request.text or {}).get("format"), "text.format")
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation")
    return request


def understand(request: ResponseRequest, before: StoredMessages, defaults: Defaults, principal: str) -> ResponseCall:
    """Parse the request, which continues the messages `before`."""
    conversation = (*before, *_messages(request.input))
    instructions = ({"role": "system", "content": request.instructions},) if request.instructions else ()
    ours = request.moa or Extension()
    grammar = answer_format((request.text or {}).get("format"), "text.format")
    mode, patience = defaults.mode_and_patience(ours)
    ask = AnswerRequest(
        question=Question(messages=(*instructions, *conversation), prediction=predicted_text(request.prediction)),
        max_tokens=request.max_output_tokens,
        temperature=temperature(request.temperature),
        top_p=request.top_p,
        seed=sampling_seed(None),
        ignore_eos=ours.ignore_eos,
        logprobs=(request.top_logprobs or 0) if _LOGPROBS in (request.include or ()) else None,
        mode=mode,
        patience=patience,
        principal=principal,
        grammar=grammar,
    )
    return ResponseCall(
        ask=ask,
        conversation=conversation,
        fields={name: getattr(request, name) for name in _REPEATED}
        | {
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "temperature": 0.0 if request.temperature is None else request.temperature,
            "top_logprobs": request.top_logprobs or 0,
            "metadata": request.metadata or {},
            "store": request.store is not False,
            "background": bool(request.background),
            "text": {"format": (request.text or {}).get("format") if grammar else {"type": "text"}},
        },
        stream=bool(request.stream),
        store=request.store is not False,
        background=bool(request.background),
        resumable=bool(request.background) or ours.resumable,
    )


def _messages(given: str | Sequence[Item]) -> Iterator[dict[str, str]]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if item.type != "message" or item.role is None:
            raise bad(f"{where}: only messages are supported, not {item.type!r}", where, "unsupported_content")
        yield {"role": chat_role(item.role, where), "content": content_text(item.content, f"{where}.content")}


class ResponseShape:
    """One response: its current state, and the events for each change."""

    def __init__(self, model: str, call: ResponseCall) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self.text = ""
        self._logprobs: list[msgspec.Raw] = []
        self._item = f"msg_{secrets.token_hex(16)}"
        self._model, self._created = model, int(time.time())
        self._fields, self._conversation = call.fields, call.conversation
        self._status, self._begun = "in_progress", False
        self._completed: int | None = None
        self._why: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.unverified: str | None = None
        """The text, when it is complete and part of it was never verified."""
        self._counts: Counts | None = None
        self._number = -1

    @property
    def size(self) -> int:
        """Bytes of the texts that are kept with it."""
        return len(msgspec.json.encode((self._fields, self._conversation)))

    @property
    def messages(self) -> StoredMessages:
        """The conversation that a later request continues."""
        return (*self._conversation, {"role": "assistant", "content": self.text})

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        return {
            **self._fields,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "incomplete_details": self._why,
            "model": self._model,
            "output": [self._message()] if self._begun else [],
            "error": _error(self.error) if self.error is not None else None,
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "parallel_tool_calls": True,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "reasoning": None,
            "usage": _usage(self._counts) if self._counts is not None else None,
            "max_tool_calls": None,
            "service_tier": "default",
        }

    # ---- events

    def begin(self) -> Iterator[dict[str, Any]]:
        """Events for a new response and its one message."""
        yield self._event("response.created", response=self.snapshot())
        yield self._event("response.in_progress", response=self.snapshot())
        item = self._message() | {"content": []}
        self._begun = True
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=_text_part(""))

    def piece(self, show: Show, *, marked: bool) -> Iterator[dict[str, Any]]:
        """Events for added and removed text; `marked` for clients that know our events."""
        self.text = self.text[: show.cut] + show.text
        marks = {"moa": {"verified": show.verified}} if marked else {}
        if marked and (show.cut is not None or not show.text):
            yield self._part_event("moa:output_text.revised", cut=show.cut, verified=show.verified)
        if show.text or show.logprobs:
            told = logprobs.parts(show.logprobs)
            self._logprobs += told
            yield self._part_event("response.output_text.delta", delta=show.text, logprobs=told, **marks)

    def news(self, event: LinkNews | Note) -> dict[str, Any]:
        """Other events of the answer, for clients that know our events."""
        if isinstance(event, LinkNews):
            return self._event("moa:link", state=event.state, detail=event.detail)
        return self._event("moa:notice", message=event.message)

    def end(self, ended: Ended) -> Iterator[dict[str, Any]]:
        """Events at the end of the answer."""
        self._counts = ended.counts
        cut_short = ended.reason not in ("eos", "stop")
        self._status = "incomplete" if cut_short else "completed"
        self._completed = None if cut_short else int(time.time())
        limit = ended.reason in ("length", "context")
        self._why = {"reason": "max_output_tokens" if limit else ended.reason} if cut_short else None
        yield self._part_event("response.output_text.done", text=self.text, logprobs=self._logprobs)
        yield self._part_event("response.content_part.done", part=_text_part(self.text, self._logprobs))
        yield self._event("response.output_item.done", output_index=0, item=self._message())
        yield self._event(f"response.{self._status}", response=self.snapshot())

    def fail(self, error: ApiError) -> dict[str, Any]:
        """Events after an error."""
        self._status, self.error = "failed", error
        return self._event("response.failed", response=self.snapshot())

    def close(self) -> None:
        """No more events follow; a response that is not complete was cancelled."""
        if self._status == "in_progress":
            self._status = "cancelled"

    # ---- parts

    def _message(self) -> dict[str, Any]:
        status = "incomplete" if self._status in ("failed", "cancelled") else self._status
        return {
            "type": "message",
            "id": self._item,
            "status": status,
            "role": "assistant",
            "content": [_text_part(self.text, self._logprobs)],
        }

    def _part_event(self, type: str, **fields: Any) -> dict[str, Any]:
        return self._event(type, item_id=self._item, output_index=0, content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number, **fields}


def _text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.tokens,
        "moa": {"drafted": counts.drafted, "accepted": counts.accepted, "calls": counts.calls, **counts.more},
    }


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": str(error)}
