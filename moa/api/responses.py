"""The text part of Open Responses, `/v1/responses`, from its request to its events."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moa.api import logprobs
from moa.api.answer import Began, Counts, Ended, LinkNews, Note, Reading, Scored
from moa.api.calls import WrittenCall
from moa.api.errors import ApiError, bad
from moa.api.parts import Separator
from moa.api.present import Show
from moa.api.requests import (
    AnswerTokens,
    Content,
    Defaults,
    ParsedRequest,
    Role,
    TextRequest,
    ToolChoice,
    answer_format,
    answer_request,
    chat_role,
    common_fields,
    content_text,
    decode,
    question_of,
    refuse,
    said_text,
    token_limit,
)
from moa.api.shapes import why_of
from moa.api.tools import Function, Tool, chosen
from moa.logprobs import MAX_TOP

ShortText = Annotated[str, Meta(max_length=512)]
CallId = Annotated[str, Meta(max_length=128)]
FunctionName = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


class Item(msgspec.Struct):
    """An item of the input: a message."""

    role: Role | None = None
    content: Content = None
    type: str = "message"
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str = "{}"
    output: Content = None


class ResponseRequest(TextRequest, kw_only=True):
    """Body of `/v1/responses`."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=1024)]
    instructions: str | None = None
    max_output_tokens: AnswerTokens | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: Metadata | None = None
    tools: Annotated[list[Function], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt: Any = None
    conversation: Any = None


_response_of = msgspec.json.Decoder(ResponseRequest)


_REPEATED = ("instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key")
"""Fields of the request that the response repeats as they are."""
_NOT_KEPT = {
    "previous_response_id": "send the whole conversation as input",
    "background": 'send stream: true and moa: {"resumable": true}, and resume the stream by its id',
}
"""What would need a response to be kept, and what to send instead."""
_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log-probabilities."""


class ResponseCall(ParsedRequest, frozen=True, kw_only=True):
    """A parsed request for a response, which has one choice."""

    fields: dict[str, Any]
    """The fields of the response that repeat the request's."""


def parse_response(body: bytes, defaults: Defaults, principal: str) -> ResponseCall:
    """Parse the body of `/v1/responses`; a field that is wrong, or not supported and would change
    the answer, is an `ApiError` that names it."""
    request = decode(body, _response_of)
    refuse(request, "prompt", "conversation")
    for name, instead in _NOT_KEPT.items():
        if getattr(request, name):
            raise bad(f"{name}: no response is kept here: {instead}", name, "unsupported_parameter")
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    messages += _messages(request.input)
    tools = [Tool(function) for function in request.tools or ()]
    text_format = (request.text or {}).get("format")
    grammar = answer_format(text_format, "text.format")
    logprobs = None
    if _LOGPROBS in (request.include or ()):
        logprobs = request.top_logprobs or 0
    question = question_of(
        request,
        messages=messages,
        may_trim=request.truncation != "disabled",
        tools=chosen(request.tool_choice, tools, request.parallel_tool_calls),
    )
    ask = answer_request(
        request,
        question,
        defaults,
        max_tokens=token_limit("max_output_tokens", request.max_output_tokens),
        logprobs=logprobs,
        principal=principal,
        grammar=grammar,
    )
    return ResponseCall(
        **common_fields(request),
        asks=(ask,),
        fields=_repeated_fields(request, text_format if grammar else {"type": "text"}),
    )


def _repeated_fields(request: ResponseRequest, text_format: Any) -> dict[str, Any]:
    """The fields of a response that repeat those of the request, as OpenAI's do, with the defaults
    of what it left out. `text_format` is what the answer must match."""
    functions = [
        {"type": "function", **msgspec.to_builtins(function)} for function in request.tools or ()
    ]
    return {name: getattr(request, name) for name in _REPEATED} | {
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "temperature": request.temperature or 0.0,
        "top_logprobs": request.top_logprobs or 0,
        "metadata": request.metadata or {},
        "tools": functions,
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "truncation": request.truncation or "auto",
        "text": {"format": text_format},
    }


def _messages(given: str | Sequence[Item]) -> Iterator[dict[str, Any]]:
    """The messages of an input, for the chat template."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    for number, item in enumerate(given):
        if item.type == "reasoning":
            continue  # of an earlier answer that the client returns: templates leave it out
        yield _message(item, f"input[{number}]")


def _message(item: Item, where: str) -> dict[str, Any]:
    """The chat message for an item of a request's input: a message, a call of a tool, or a call's
    result. `where` says where it is in the request, for errors."""
    if item.type == "function_call" and item.call_id and item.name:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output" and item.call_id:
        content = content_text(item.output, f"{where}.output")
        return {"role": "tool", "content": content, "tool_call_id": item.call_id}
    if item.type == "message" and item.role is not None:
        content = said_text(item.role, item.content, f"{where}.content")
        return {"role": chat_role(item.role, where), "content": content}
    raise bad(
        f"{where}: only messages and calls are supported, not {item.type!r}",
        where,
        "unsupported_content",
    )


OutputKind = Literal["reasoning", "message"]


class OutputItem:
    """An item of a response whose text grows: the reasoning, or the message."""

    def __init__(self, kind: OutputKind) -> None:
        """Begin an item without text, with an id of its own."""
        self.kind = kind
        self.is_message = kind == "message"
        prefix = "msg" if self.is_message else "rs"
        self.id = f"{prefix}_{secrets.token_hex(16)}"
        self.content = "output_text" if self.is_message else "reasoning_text"
        """The type of its one part."""
        self.text = ""
        self.logprobs: list[msgspec.Raw] = []
        self.closed = False
        """Whether its end was sent since the last change."""

    def take(self, part: Show, scored: Sequence[Scored]) -> list[msgspec.Raw]:
        """Change the item's text, and keep the log-probabilities of its new tokens; returns these
        as they are sent."""
        new_logprobs = logprobs.parts(scored)
        self.text = self.text[: part.cut] + part.text
        self.closed = False
        self.logprobs += new_logprobs
        return new_logprobs

    def part(self) -> dict[str, Any]:
        """Its one part."""
        part: dict[str, Any] = {"type": self.content, "text": self.text}
        if self.is_message:
            part["annotations"] = []
            part["logprobs"] = list(self.logprobs)  # as they are now: more may come
        return part

    def snapshot(self, status: str) -> dict[str, Any]:
        """The item as it is in a response object whose own status is this."""
        if self.closed and not self.is_message:
            status = "completed"  # the reasoning is, also of an answer that is not
        elif status == "failed":
            status = "incomplete"  # an item has no such status
        own: dict[str, Any] = {"role": "assistant"} if self.is_message else {"summary": []}
        return {
            "type": self.kind,
            "id": self.id,
            "status": status,
            **own,
            "content": [self.part()],
        }


class ResponseShape:
    """One response: its current state, and the events for each change."""

    def __init__(self, model: str, call: ResponseCall) -> None:
        """Begin the response to a request (`call`), which is in progress."""
        self.id = f"resp_{secrets.token_hex(16)}"
        self._question = call.asks[0].question
        self.marked = call.asks[0].mode == "provisional"
        """For clients that know our events, and so can take text back."""
        self._parts = Separator()
        self._items: list[OutputItem | dict[str, Any]] = []
        """The output. A call is complete when it comes, and so an object already."""
        self._calls = 0
        """How many of the items are calls."""
        self._model = model
        self._created = int(time.time())
        self._fields = call.fields
        self._status = "in_progress"
        self._completed: int | None = None
        """When the response was completed, in seconds since 1970."""
        self._incomplete_details: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.ends: dict[int, Ended] = {}
        """How the answer has ended, when it has."""
        self.verified: Counter[int] = Counter()
        """How many characters of each choice's text its client knows to be verified."""
        self._events = 0
        """How many were sent."""

    def snapshot(self) -> dict[str, Any]:
        """The response as an object of OpenAI's API, as it is now: it is sent when the response is
        created, when it has ended, and as the answer to a request that does not stream."""
        output = [
            item if isinstance(item, dict) else item.snapshot(self._status) for item in self._items
        ]
        error = None
        if self.error is not None:
            error = {"code": self.error.code or "server_error", "message": str(self.error)}
        return {
            **self._fields,
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "incomplete_details": self._incomplete_details,
            "model": self._model,
            "output": output,
            "error": error,
            "reasoning": None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "usage": _usage(self.ends[0].counts) if self.ends else None,
            "max_tool_calls": None,
            "service_tier": "default",
            **self._ended(),
        }

    def _ended(self) -> dict[str, Any]:
        """Our field of a response that has ended: why, and whether all of it is verified."""
        if not self.ends:
            return {}
        ended = self.ends[0]
        return {"moa": {"reason": ended.reason, "verified": ended.verified, **why_of(ended)}}

    # ---- events

    def begin(self, index: int, event: Began) -> list[dict[str, Any]]:
        """Returns the events for a new response, which has one choice."""
        self._parts = Separator(thinking=event.thinking, reader=self._question.call_reader())
        return [
            self._event("response.created", response=self.snapshot()),
            self._event("response.in_progress", response=self.snapshot()),
        ]

    def piece(
        self, index: int, show: Show | None, *, alone: bool = False, last: bool = False
    ) -> list[dict[str, Any]]:
        """Returns the events for a change of the text: of the reasoning, the message, and new calls
        of tools. The `last` change brings what was held back. Clients that know our events
        (`marked`) are told, too, when text is withdrawn or verified."""
        if show is not None:
            self.verified[index] = show.verified
        events = []
        reasoning, answer = self._parts.take(show, last=last)
        if reasoning.text or reasoning.cut is not None:
            events += self._change("reasoning", reasoning, alone=alone)
        scored = show.logprobs if show is not None else ()
        is_change = bool(answer.text) or answer.cut is not None or bool(scored)
        is_news_of_verification = self.marked and show is not None
        is_empty_answer = last and not self._parts.calls  # it has a message all the same
        if is_change or is_news_of_verification or is_empty_answer:
            events += self._change("message", answer, scored, alone=alone)
        if last or not self.marked:  # else the text of a call may still be withdrawn
            for call in self._parts.calls[self._calls :]:
                events += self._call(call)
        return events

    def _call(self, call: WrittenCall) -> list[dict[str, Any]]:
        """Returns the events for a complete call of a tool. Clients expect one that is written
        piece by piece, so that it is begun, added to and ended."""
        events = self._close_items()
        id = f"fc_{secrets.token_hex(16)}"
        item = {
            "type": "function_call",
            "id": id,
            "status": "completed",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": call.arguments,
        }
        index = len(self._items)
        self._items.append(item)
        self._calls += 1
        events += [
            self._event(
                "response.output_item.added",
                item=item | {"arguments": "", "status": "in_progress"},
                output_index=index,
            ),
            self._event(
                "response.function_call_arguments.delta",
                item_id=id,
                delta=call.arguments,
                output_index=index,
            ),
            self._event(
                "response.function_call_arguments.done",
                item_id=id,
                name=call.name,
                arguments=call.arguments,
                output_index=index,
            ),
            self._event("response.output_item.done", item=item, output_index=index),
        ]
        return events

    def _change(
        self, kind: OutputKind, part: Show, scored: Sequence[Scored] = (), *, alone: bool
    ) -> list[dict[str, Any]]:
        """Returns the events for a change of the reasoning or the message. If it has not begun yet,
        that is announced first, and what was written before it is ended. `scored` are
        log-probabilities of tokens in it; `alone` says that the device wrote it without the
        verifier."""
        events = []
        item = self._item(kind)
        if item is None or (part.text and self._is_behind_calls()):
            events += self._close_items()
            item = OutputItem(kind)
            self._items.append(item)
            empty = item.snapshot(self._status) | {"content": []}
            events += [
                self._event(
                    "response.output_item.added", output_index=len(self._items) - 1, item=empty
                ),
                self._part_event(item, "response.content_part.added", part=item.part()),
            ]
        new_logprobs = item.take(part, scored)
        if self.marked and (part.cut is not None or not part.text):
            events.append(
                self._part_event(
                    item, f"moa:{item.content}.revised", cut=part.cut, verified=part.verified
                )
            )
        if part.text or scored:
            more: dict[str, Any] = {}
            if item.is_message:
                more["logprobs"] = new_logprobs
            if self.marked:
                more["moa"] = {"verified": part.verified}
            elif alone:
                more["moa"] = {"unverified": True}
            events.append(
                self._part_event(item, f"response.{item.content}.delta", delta=part.text, **more)
            )
        return events

    def _item(self, kind: OutputKind) -> OutputItem | None:
        """The reasoning or the message, if it has begun; the latest."""
        for item in reversed(self._items):
            if isinstance(item, OutputItem) and item.kind == kind:
                return item
        return None

    def _is_behind_calls(self) -> bool:
        """Whether what is written now stands behind calls that were sent already. Where
        text may be withdrawn, its positions count in one item, and calls come last."""
        return not self.marked and isinstance(self._items[-1], dict)

    def _close_items(self) -> list[dict[str, Any]]:
        """Returns the events that end the reasoning and the message, where they have begun and have
        not been ended since their last change."""
        events = []
        for index, item in enumerate(self._items):
            if not isinstance(item, OutputItem) or item.closed:
                continue
            item.closed = True
            part = item.part()
            more = {"logprobs": part["logprobs"]} if item.is_message else {}
            events += [
                self._part_event(item, f"response.{item.content}.done", text=item.text, **more),
                self._part_event(item, "response.content_part.done", part=part),
                self._event(
                    "response.output_item.done",
                    output_index=index,
                    item=item.snapshot(self._status),
                ),
            ]
        return events

    def news(self, event: LinkNews | Note | Reading) -> dict[str, Any]:
        """Other events of the answer, for clients that know our events."""
        if isinstance(event, LinkNews):
            return self._event("moa:link", state=event.state, detail=event.detail)
        if isinstance(event, Reading):
            return self._event("moa:reading", done=event.done, total=event.total, by=event.by)
        return self._event("moa:notice", message=event.message)

    def end(self, index: int, ended: Ended) -> list[dict[str, Any]]:
        """Returns the events at the end of the answer: it is completed if the model has ended it,
        else incomplete."""
        self.ends[index] = ended
        if ended.reason in ("eos", "stop"):
            self._status = "completed"
            self._completed = int(time.time())
            self._incomplete_details = None
        else:
            is_limit = ended.reason in ("length", "context")
            self._status = "incomplete"
            self._completed = None
            self._incomplete_details = {"reason": "max_output_tokens" if is_limit else ended.reason}
        return [
            *self._close_items(),
            self._event(f"response.{self._status}", response=self.snapshot()),
        ]

    def fail(self, error: ApiError) -> dict[str, Any]:
        """The event for an error, the last."""
        self._status = "failed"
        self.error = error
        return self._event("response.failed", response=self.snapshot())

    # ---- parts

    def _part_event(self, item: OutputItem, type: str, **fields: Any) -> dict[str, Any]:
        """An event about the one part of an item."""
        index = self._items.index(item)
        return self._event(type, item_id=item.id, output_index=index, content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        """The next event, with its number."""
        number = self._events
        self._events += 1
        return {"type": type, "sequence_number": number, **fields}


def _usage(counts: Counts) -> dict[str, Any]:
    """The field `usage` of a response: its tokens, and in `moa`, a field of ours, how many were
    drafted and accepted."""
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.tokens,
        "moa": {
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "calls": counts.calls,
            "forwards": counts.forwards,
            "forward_tokens": counts.forward_tokens,
            "unverified_tokens": counts.unverified,
            **counts.more,
        },
    }
