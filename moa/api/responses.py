"""The text part of Open Responses, `/v1/responses`, from its request to its events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moa.api import logprobs
from moa.api.answer import Began, Counts, Ended, LinkNews, Note, Reading, Scored
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
    token_limit,
)
from moa.api.tools import Function, Tool, ToolFormat, WrittenCall, chosen
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
_PENALTIES = ("presence_penalty", "frequency_penalty")
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
    """A request for a response."""
    request = decode(body, _response_of)
    refuse(request, "prompt", "conversation")
    for name, instead in _NOT_KEPT.items():
        if getattr(request, name):
            raise bad(f"{name}: no response is kept here: {instead}", name, "unsupported_parameter")
    instructions = (
        ({"role": "system", "content": request.instructions},) if request.instructions else ()
    )
    offered = request.tools or ()
    grammar = answer_format((request.text or {}).get("format"), "text.format")
    question = question_of(
        request,
        messages=(*instructions, *_messages(request.input)),
        may_trim=request.truncation != "disabled",
        tools=chosen(
            request.tool_choice, [Tool(one) for one in offered], request.parallel_tool_calls
        ),
    )
    ask = answer_request(
        request,
        question,
        defaults,
        max_tokens=token_limit("max_output_tokens", request.max_output_tokens),
        logprobs=(request.top_logprobs or 0) if _LOGPROBS in (request.include or ()) else None,
        principal=principal,
        grammar=grammar,
    )
    return ResponseCall(
        **common_fields(request),
        asks=(ask,),
        fields={name: getattr(request, name) for name in _REPEATED}
        | {name: getattr(request, name) or 0.0 for name in _PENALTIES}
        | {
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "temperature": 0.0 if request.temperature is None else request.temperature,
            "top_logprobs": request.top_logprobs or 0,
            "metadata": request.metadata or {},
            "tools": [{"type": "function", **msgspec.to_builtins(tool)} for tool in offered],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "truncation": request.truncation or "auto",
            "text": {"format": (request.text or {}).get("format") if grammar else {"type": "text"}},
        },
    )


def _messages(given: str | Sequence[Item]) -> Iterator[dict[str, Any]]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if (
            item.type == "reasoning"
        ):  # of an earlier answer that the client returns: templates leave it out
            continue
        if item.type == "function_call" and item.call_id and item.name:
            called = {"name": item.name, "arguments": item.arguments}
            calls = [{"id": item.call_id, "type": "function", "function": called}]
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            continue
        if item.type == "function_call_output" and item.call_id:
            content = content_text(item.output, f"{where}.output")
            yield {"role": "tool", "content": content, "tool_call_id": item.call_id}
            continue
        if item.type != "message" or item.role is None:
            raise bad(
                f"{where}: only messages and calls are supported, not {item.type!r}",
                where,
                "unsupported_content",
            )
        yield {
            "role": chat_role(item.role, where),
            "content": content_text(item.content, f"{where}.content"),
        }


OutputKind = Literal["reasoning", "message"]


class OutputItem:
    """An item of a response whose text grows: the reasoning, or the message."""

    def __init__(self, kind: OutputKind) -> None:
        self.kind = kind
        self.id = f"{'rs' if kind == 'reasoning' else 'msg'}_{secrets.token_hex(16)}"
        self.content = "reasoning_text" if kind == "reasoning" else "output_text"
        self.text = ""
        self.logprobs: list[msgspec.Raw] = []
        self.closed = False
        """Whether its end was sent since the last change."""

    def take(self, part: Show, scored: Sequence[Scored]) -> list[msgspec.Raw]:
        """A change of its text; returns the log-probabilities as they are sent."""
        told = logprobs.parts(scored)
        self.text = self.text[: part.cut] + part.text
        self.closed = False
        self.logprobs += told
        return told

    def part(self) -> dict[str, Any]:
        """Its one part."""
        more = {"annotations": [], "logprobs": self.logprobs} if self.kind == "message" else {}
        return {"type": self.content, "text": self.text, **more}

    def snapshot(self, status: str) -> dict[str, Any]:
        """The item in a response of this status."""
        if self.closed and self.kind == "reasoning":
            status = "completed"
        status = "incomplete" if status == "failed" else status
        more: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {
            "type": self.kind,
            "id": self.id,
            "status": status,
            **more,
            "content": [self.part()],
        }


class ResponseShape:
    """One response: its current state, and the events for each change."""

    def __init__(self, model: str, call: ResponseCall, form: ToolFormat | None = None) -> None:
        """`form`: how the model writes calls, if it may."""
        self.id = f"resp_{secrets.token_hex(16)}"
        self._form = form
        self.marked = call.asks[0].mode == "provisional"
        """For clients that know our events, and so can take text back."""
        self._parts = Separator()
        self._items: list[OutputItem | dict[str, Any]] = []
        """A call is complete when it comes, and so an object already."""
        self._model = model
        self._created = int(time.time())
        self._fields = call.fields
        self._status = "in_progress"
        self._completed: int | None = None
        self._why: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.ends: dict[int, Ended] = {}
        """How the answer has ended, when it has."""
        self._number = -1

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
            "output": [
                item if isinstance(item, dict) else item.snapshot(self._status)
                for item in self._items
            ],
            "error": self.error
            and {"code": self.error.code or "server_error", "message": str(self.error)},
            "reasoning": None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "usage": _usage(self.ends[0].counts) if self.ends else None,
            "max_tool_calls": None,
            "service_tier": "default",
        }

    # ---- events

    def begin(self, index: int, event: Began) -> Iterator[dict[str, Any]]:
        """Events for a new response, which has one choice."""
        self._parts = Separator(thinking=event.thinking, form=self._form)
        yield self._event("response.created", response=self.snapshot())
        yield self._event("response.in_progress", response=self.snapshot())

    def piece(
        self, index: int, show: Show | None, *, alone: bool = False, last: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Events for added and removed text; the `last` change brings what was held back."""
        reasoning, answer = self._parts.take(show, last=last)
        if reasoning.text or reasoning.cut is not None:
            yield from self._change("reasoning", reasoning)
        scored = show.logprobs if show is not None else ()
        nothing = last and not self._parts.calls
        if (
            answer.text
            or answer.cut is not None
            or scored
            or nothing
            or (self.marked and show is not None)
        ):
            yield from self._change("message", answer, scored)
        if last or not self.marked:  # else the text of a call may still be withdrawn
            for call in self._parts.calls[sum(isinstance(item, dict) for item in self._items) :]:
                yield from self._call(call)

    def _call(self, call: WrittenCall) -> Iterator[dict[str, Any]]:
        yield from self._close_items()
        id = f"fc_{secrets.token_hex(16)}"
        place = {"output_index": len(self._items)}
        told = {
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": call.arguments,
        }
        item = {"type": "function_call", "id": id, "status": "completed", **told}
        self._items.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", item=begun, **place)
        yield self._event(
            "response.function_call_arguments.delta", item_id=id, delta=call.arguments, **place
        )
        done = {"item_id": id, "name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **done, **place)
        yield self._event("response.output_item.done", item=item, **place)

    def _change(
        self, kind: OutputKind, part: Show, scored: Sequence[Scored] = ()
    ) -> Iterator[dict[str, Any]]:
        item = next(
            (item for item in self._items if isinstance(item, OutputItem) and item.kind == kind),
            None,
        )
        if item is None:
            yield from self._close_items()
            item = OutputItem(kind)
            self._items.append(item)
            empty = item.snapshot(self._status) | {"content": []}
            yield self._event(
                "response.output_item.added", output_index=len(self._items) - 1, item=empty
            )
            yield self._part_event(item, "response.content_part.added", part=item.part())
        told = item.take(part, scored)
        if self.marked and (part.cut is not None or not part.text):
            yield self._part_event(
                item, f"moa:{item.content}.revised", cut=part.cut, verified=part.verified
            )
        if part.text or scored:
            more: dict[str, Any] = {"logprobs": told} if kind == "message" else {}
            more |= {"moa": {"verified": part.verified}} if self.marked else {}
            yield self._part_event(item, f"response.{item.content}.delta", delta=part.text, **more)

    def _close_items(self) -> Iterator[dict[str, Any]]:
        for index, item in enumerate(self._items):
            if not isinstance(item, OutputItem) or item.closed:
                continue
            item.closed = True
            more: dict[str, Any] = {"logprobs": item.logprobs} if item.kind == "message" else {}
            yield self._part_event(item, f"response.{item.content}.done", text=item.text, **more)
            yield self._part_event(item, "response.content_part.done", part=item.part())
            yield self._event(
                "response.output_item.done", output_index=index, item=item.snapshot(self._status)
            )

    def news(self, event: LinkNews | Note | Reading) -> dict[str, Any]:
        """Other events of the answer, for clients that know our events."""
        if isinstance(event, LinkNews):
            return self._event("moa:link", state=event.state, detail=event.detail)
        if isinstance(event, Reading):
            return self._event("moa:reading", done=event.done, total=event.total)
        return self._event("moa:notice", message=event.message)

    def end(self, index: int, ended: Ended) -> Iterator[dict[str, Any]]:
        """Events at the end of the answer."""
        self.ends[index] = ended
        cut_short = ended.reason not in ("eos", "stop")
        self._status = "incomplete" if cut_short else "completed"
        self._completed = None if cut_short else int(time.time())
        limit = ended.reason in ("length", "context")
        self._why = (
            {"reason": "max_output_tokens" if limit else ended.reason} if cut_short else None
        )
        yield from self._close_items()
        yield self._event(f"response.{self._status}", response=self.snapshot())

    def fail(self, error: ApiError) -> dict[str, Any]:
        """Events after an error."""
        self._status = "failed"
        self.error = error
        return self._event("response.failed", response=self.snapshot())

    # ---- parts

    def _part_event(self, item: OutputItem, type: str, **fields: Any) -> dict[str, Any]:
        index = self._items.index(item)
        return self._event(type, item_id=item.id, output_index=index, content_index=0, **fields)

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number, **fields}


def _usage(counts: Counts) -> dict[str, Any]:
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
            **counts.more,
        },
    }
