"""Requests of `/v1/chat/completions` and `/v1/completions`: from JSON to requests for the answerer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moa.api.answer import Question
from moa.api.errors import bad
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
    biases,
    chat_role,
    common_fields,
    decode,
    question_of,
    refuse,
    said_text,
    token_limit,
    unsupported,
)
from moa.api.tools import Tool, chosen
from moa.logprobs import MAX_TOP
from moa.wire.limits import Limits
from moa.wire.messages import TokenId

Stops = str | Annotated[list[str], Meta(max_length=Limits.max_stop_strings)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CalledFunction(msgspec.Struct):
    """What an earlier call called, and its arguments as JSON."""

    name: Annotated[str, Meta(max_length=64)]
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """An earlier call of the model."""

    id: Annotated[str, Meta(max_length=128)]
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Role
    content: Content = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=128)] | None = None
    name: Annotated[str, Meta(max_length=128)] | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class Common(TextRequest, kw_only=True):
    """Fields of chats and completions."""

    max_tokens: AnswerTokens | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.1, le=10.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """As llama.cpp's server has it; `none` leaves `<think>` in the text."""


class ChatRequest(Common, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: AnswerTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    function_call: ToolChoice = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None


_chat_of = msgspec.json.Decoder(ChatRequest)


class CompletionRequest(Common, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    """A text, ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=0, le=128)] | None = None


_completion_of = msgspec.json.Decoder(CompletionRequest)


class CompletionCall(ParsedRequest, frozen=True, kw_only=True):
    """A parsed request for a chat or a completion."""

    chat: bool
    include_usage: bool
    separate: bool
    """Whether thinking goes into a field of its own."""


def parse_chat(body: bytes, defaults: Defaults, principal: str) -> CompletionCall:
    """Parse the body of `/v1/chat/completions`; a field that is wrong, or not supported and would
    change the answer, is an `ApiError` that names it."""
    request = decode(body, _chat_of)
    _refuse_unsupported(request)
    _check_choices(1, request, defaults)
    if request.function_call not in (None, "auto", "none"):  # the old way to demand a call
        raise unsupported("function_call")
    grammar = answer_format(request.response_format, "response_format")
    if request.modalities not in (None, [], ["text"]):
        raise unsupported("modalities")
    if request.top_logprobs and not request.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    messages = messages_of(request.messages)
    tools = chosen(request.tool_choice, request.tools, request.parallel_tool_calls)
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    return _call(
        request,
        [question_of(request, messages=messages, tools=tools)],
        defaults,
        chat=True,
        max_tokens=token_limit("max_tokens", request.max_completion_tokens, request.max_tokens),
        logprobs=logprobs,
        principal=principal,
        grammar=grammar,
    )


def parse_completion(body: bytes, defaults: Defaults, principal: str) -> CompletionCall:
    """Parse the body of `/v1/completions`; a field that is wrong, or not supported and would change
    the answer, is an `ApiError` that names it."""
    request = decode(body, _completion_of)
    _refuse_unsupported(request)
    if request.chat_template_kwargs:  # a completion has no template
        raise unsupported("chat_template_kwargs")
    prompts = _prompts(request.prompt)
    _check_choices(len(prompts), request, defaults)  # before anything is made of them
    questions = []
    for prompt in prompts:
        if isinstance(prompt, str):
            questions.append(question_of(request, text=prompt))
        else:
            questions.append(question_of(request, ids=tuple(prompt)))
    return _call(
        request,
        questions,
        defaults,
        chat=False,
        max_tokens=token_limit("max_tokens", request.max_tokens, _COMPLETION_TOKENS),
        logprobs=request.logprobs,
        principal=principal,
    )


_COMPLETION_TOKENS = 16
"""OpenAI's default for the length of a completion."""


def messages_of(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A request's messages as chat templates take them."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message of a request as chat templates take it. `where` says where it is in the request,
    for errors."""
    is_result = message.role == "tool"
    found: dict[str, Any] = {
        "role": "tool" if is_result else chat_role(message.role, where),
        "content": said_text(message.role, message.content, f"{where}.content"),
    }
    if message.tool_calls:
        found["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    return found


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts at which an answer is to stop, from a request's one text or list of them. An
    `ApiError` for one that is longer than a verifier may be sent."""
    given = [stop] if isinstance(stop, str) else stop or []
    texts = tuple(text for text in given if text)  # an empty one would stop at once
    longest = max((len(text.encode()) for text in texts), default=0)
    if longest > Limits.max_stop_bytes:
        raise bad(f"stop: a text of {longest} bytes, at most {Limits.max_stop_bytes}", "stop")
    return texts


def _call(
    request: Common, questions: Sequence[Question], defaults: Defaults, *, chat: bool, **more: Any
) -> CompletionCall:
    """The parsed request: `n` answers to each question, each with an `AnswerRequest` of its own;
    `more` are fields that all of these have."""
    more["stop"] = stop_texts(request.stop)
    more["logit_bias"] = biases(request.logit_bias)
    asks = []
    for question in questions:
        for choice in range(request.n or 1):
            asks.append(answer_request(request, question, defaults, choice=choice, **more))
    options = request.stream_options or StreamOptions()
    return CompletionCall(
        **common_fields(request),
        asks=tuple(asks),
        chat=chat,
        include_usage=bool(options.include_usage),
        separate=chat and request.reasoning_format != "none",
    )


def _check_choices(questions: int, request: Common, defaults: Defaults) -> None:
    """Refuse a request for more answers than one may have."""
    choices = questions * (request.n or 1)
    if choices > defaults.max_choices:
        raise bad(f"{choices} answers in one request, at most {defaults.max_choices}", "n")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion, each a text or a list of token ids. A request gives one text,
    the ids of one prompt, a list of texts, or a list of lists of ids; a list may not mix texts and
    ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise bad("the prompt mixes texts and ids", "prompt")
    if kinds == {int}:
        return [prompt]  # the ids of one prompt
    return prompt


def _refuse_unsupported(request: Common) -> None:
    """Refuse what would change the answers, of chats and of completions."""
    refuse(request, "audio", "echo", "suffix")
    best_of = getattr(request, "best_of", None) or 1
    if best_of > (request.n or 1):
        raise unsupported("best_of")
