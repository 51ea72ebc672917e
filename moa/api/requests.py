"""Requests of `/v1/chat/completions` and `/v1/completions`: from JSON to requests for the answerer.

An unsupported parameter that would change the answer is refused by name. Unknown ones are ignored: clients send many.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from moa.api.answer import AnswerRequest, Mode, Question
from moa.api.errors import ApiError, bad
from moa.api.tools import Tool, chosen
from moa.grammar.spec import Grammar
from moa.logprobs import MAX_TOP
from moa.sampling import MAX_SEED, MIN_TEMPERATURE
from moa.wire.limits import Limits
from moa.wire.messages import TokenId

Parsed = TypeVar("Parsed", bound=msgspec.Struct)
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Stops = str | Annotated[list[str], Meta(max_length=Limits.max_stop_strings)]
Role = Annotated[str, Meta(min_length=1, max_length=32)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class TextPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None


Content = str | list[TextPart] | None
Variable = bool | None | Annotated[int, Meta(ge=-(2**31), le=2**31)] | float | Annotated[str, Meta(max_length=256)]
TemplateVariables = Annotated[dict[Annotated[str, Meta(max_length=64)], Variable], Meta(max_length=16)]
ToolChoice = str | dict[str, Any] | None


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


class PredictedContent(msgspec.Struct):
    """Text that the answer is expected to contain."""

    content: Content
    type: Literal["content"] = "content"


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """Our own field, `moa`, for what OpenAI's API does not have."""

    mode: Mode | None = None
    patience: Annotated[float, Meta(ge=0.0, le=3600.0)] | None = None
    resumable: bool = False


class TextRequest(msgspec.Struct, kw_only=True):
    """Fields that all routes have."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    prediction: PredictedContent | None = None
    chat_template_kwargs: TemplateVariables | None = None
    ignore_eos: bool | None = None
    moa: Extension | None = None


class Common(TextRequest, kw_only=True):
    """Fields of chats and completions."""

    max_tokens: PositiveInt | None = None
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
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    function_call: ToolChoice = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(Common, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    """A text, ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=0, le=128)] | None = None


_NO_VARIABLES = frozenset(
    (
        *("self", "conversation", "messages", "tools", "tool_choice", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""What is a parameter of transformers' `apply_chat_template`, or in every template anyway."""
_AS_ASKED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
"""What is asked of an answerer as the request says it."""
_PATIENCE: dict[Mode, float] = {"hold": 20.0, "provisional": 5.0, "keep": 1.0}
"""Seconds to wait for a lost link when the text is complete, in hold since text waits to be verified; clients and
proxies give up after 30 to 60."""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request: one `AnswerRequest` for each choice."""

    asks: tuple[AnswerRequest, ...]
    chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    resumable: bool
    separate: bool
    """Whether thinking goes into a field of its own."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The server's defaults and limits for requests."""

    mode: Mode = "keep"
    patience: float | None = None
    """Seconds; None: what suits the request's mode."""
    max_choices: int = 16

    def mode_and_patience(self, ours: Extension) -> tuple[Mode, float]:
        """The request's own, or the defaults."""
        mode = ours.mode or self.mode
        given = self.patience if ours.patience is None else ours.patience
        return mode, _PATIENCE[mode] if given is None else given


def parse_chat(body: bytes, defaults: Defaults, principal: str) -> ParsedRequest:
    """A chat request."""
    request = decode(body, ChatRequest)
    _refuse_unsupported(request)
    _check_choices(1, request, defaults)
    if request.function_call not in (None, "auto", "none"):  # the old way to demand a call
        raise unsupported("function_call")
    grammar = answer_format(request.response_format, "response_format")
    if request.modalities not in (None, [], ["text"]):
        raise unsupported("modalities")
    if request.top_logprobs and not request.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(request.messages)]
    question = Question(
        messages=messages,
        prediction=predicted_text(request.prediction),
        template=template_variables(request.chat_template_kwargs),
        tools=chosen(request.tool_choice, request.tools, request.parallel_tool_calls),
    )
    return _call(
        request,
        [question],
        defaults,
        chat=True,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        principal=principal,
        grammar=grammar,
    )


def parse_completion(body: bytes, defaults: Defaults, principal: str) -> ParsedRequest:
    """A completion request."""
    request = decode(body, CompletionRequest)
    _refuse_unsupported(request)
    if request.chat_template_kwargs:  # a completion has no template
        raise unsupported("chat_template_kwargs")
    prompts, prediction = _prompts(request.prompt), predicted_text(request.prediction)
    _check_choices(len(prompts), request, defaults)  # before anything is made of them
    questions = [
        Question(text=one, prediction=prediction)
        if isinstance(one, str)
        else Question(ids=tuple(one), prediction=prediction)
        for one in prompts
    ]
    most = request.max_tokens or 16  # OpenAI's default for this route
    how = {"max_tokens": most, "logprobs": request.logprobs, "principal": principal}
    return _call(request, questions, defaults, chat=False, **how)


def decode(body: bytes, kind: type[Parsed]) -> Parsed:
    """Parse a body into this type; the error names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        raise bad(f"{param}: {message}" if param else message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}") from None


def content_text(content: Content, where: str) -> str:
    """The text of a message; other parts are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise bad(f"{where}: only text parts are supported, not {part.type!r}", where, "unsupported_content")
    return "".join(part.text or "" for part in content)


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "role": message.role if message.role == "tool" else chat_role(message.role, where),
        "content": content_text(message.content, f"{where}.content"),
    }
    if message.tool_calls:
        told["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return told | {name: given for name in ("tool_call_id", "name") if (given := getattr(message, name))}


def chat_role(role: str, where: str) -> str:
    """A role that chat templates know; `developer` is the newer name of `system`."""
    if role not in ("system", "developer", "user", "assistant"):
        raise bad(f"{where}: the role is system, developer, user, assistant or tool, not {role!r}", f"{where}.role")
    return "system" if role == "developer" else role


def answer_format(given: dict[str, Any] | None, where: str) -> Grammar | None:
    """What `response_format`, or `text.format` of a response, says that the answer must match."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.of_schema({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar.of_schema(schema)
        case {"type": "json_schema", "schema": dict(schema)} if where == "text.format":
            return Grammar.of_schema(schema)
        case {"type": "regex", "pattern": str(text)}:
            return Grammar("regex", text)
        case {"type": "grammar", "grammar": str(text)}:
            return Grammar("lark", text)
        case {"type": "json_schema"}:
            raise bad(f"{where}: a json_schema needs a schema, an object", where)
    raise bad(f"{where}: the type is text, json_object, json_schema, regex or grammar", where)


def unsupported(name: str) -> ApiError:
    """The error for a parameter that would change the answer and is not supported."""
    return bad(f"{name} is not supported here", name, "unsupported_parameter")


def refuse(request: msgspec.Struct, *names: str) -> None:
    """Refuse a request that sets any of these fields."""
    for name in names:
        if getattr(request, name, None):
            raise unsupported(name)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """What the request tells the chat template. Names with a meaning of their own are refused: a template in a request
    would be a program."""
    for name in given or {}:
        if not name.isidentifier() or name in _NO_VARIABLES or name.endswith("_token"):
            raise bad(f"chat_template_kwargs: {name!r} cannot be set here", f"chat_template_kwargs.{name}")
    return given or {}


def predicted_text(prediction: PredictedContent | None) -> str:
    """The text of a prediction, or none."""
    return content_text(prediction.content, "prediction.content") if prediction is not None else ""


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop texts of a request, each within the wire's limit."""
    texts = tuple(text for text in ((stop,) if isinstance(stop, str) else stop or ()) if text)
    longest = max((len(text.encode()) for text in texts), default=0)
    if longest > Limits.max_stop_bytes:
        raise bad(f"stop: a text of {longest} bytes, at most {Limits.max_stop_bytes}", "stop")
    return texts


def answer_request(
    request: TextRequest, question: Question, defaults: Defaults, *, choice: int = 0, **more: Any
) -> AnswerRequest:
    """The request for one answer; `more` are the fields whose names or meaning differ between the routes. The seed is
    the request's, plus the choice's number, or a random one; the sampler's seeds are not negative. A temperature that
    is too small to divide by is greedy."""
    asked = {name: given for name in _AS_ASKED if (given := getattr(request, name, None)) is not None}
    mode, patience = defaults.mode_and_patience(request.moa or Extension())
    seed = getattr(request, "seed", None)
    if asked.get("temperature", MIN_TEMPERATURE) < MIN_TEMPERATURE:
        asked["temperature"] = 0.0
    if "top_k" in asked:
        asked["top_k"] = max(0, asked["top_k"])
    return AnswerRequest(
        question=question,
        seed=(random.SystemRandom().getrandbits(62) if seed is None else seed + choice) & MAX_SEED,
        mode=mode,
        patience=patience,
        **asked,
        **more,
    )


def _call(
    request: Common, questions: Sequence[Question], defaults: Defaults, *, chat: bool, **more: Any
) -> ParsedRequest:
    more["stop"] = stop_texts(request.stop)
    asks = tuple(
        answer_request(request, question, defaults, choice=choice, **more)
        for question in questions
        for choice in range(request.n or 1)
    )
    options = request.stream_options or StreamOptions()
    return ParsedRequest(
        asks=asks,
        chat=chat,
        model=request.model,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        resumable=bool(request.stream and request.moa and request.moa.resumable),
        separate=chat and request.reasoning_format != "none",
    )


def _check_choices(questions: int, request: Common, defaults: Defaults) -> None:
    choices = questions * (request.n or 1)
    if choices > defaults.max_choices:
        raise bad(f"{choices} answers in one request, at most {defaults.max_choices}", "n")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    given: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if len({type(one) for one in given}) > 1:
        raise bad("the prompt mixes texts and ids", "prompt")
    return [given] if isinstance(given[0], int) else given


def _refuse_unsupported(request: Common) -> None:
    refuse(request, "presence_penalty", "frequency_penalty", "logit_bias", "audio", "echo", "suffix")
    if (getattr(request, "best_of", None) or 1) > (request.n or 1):
        raise unsupported("best_of")
