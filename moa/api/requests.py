"""What requests of all routes have in common, from JSON to requests for the answerer.

An unsupported parameter that would change the answer is refused by name. Unknown ones are ignored:
clients send many.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from moa.api.answer import AnswerRequest, Mode, Question
from moa.api.errors import ApiError, bad
from moa.api.wording import in_our_words
from moa.grammar.spec import Grammar
from moa.sampling import MAX_BIASED, MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE

Parsed = TypeVar("Parsed", bound=msgspec.Struct)
_CHOICES: dict[str, tuple[str, ...]] = {"moa.mode": get_args(Mode)}
"""All values of a field that has only a few."""
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
AnswerTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""-1 is without a limit, as llama.cpp and LM Studio have it."""
Role = Annotated[str, Meta(min_length=1, max_length=32)]


class TextPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None


Content = str | list[TextPart] | None
Variable = (
    bool
    | None
    | Annotated[int, Meta(ge=-(2**31), le=2**31)]
    | float
    | Annotated[str, Meta(max_length=256)]
)
TemplateVariables = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Variable], Meta(max_length=16)
]
ToolChoice = str | dict[str, Any] | None


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
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    prediction: PredictedContent | None = None
    chat_template_kwargs: TemplateVariables | None = None
    ignore_eos: bool | None = None
    moa: Extension | None = None


_NO_VARIABLES = frozenset(
    (
        "self",
        "conversation",
        "messages",
        "tools",
        "tool_choice",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
    )
)
"""Names that are no template's variables: parameters of transformers' `apply_chat_template`, or what
is in every template anyway."""
_AS_ASKED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
)
"""Fields that an `AnswerRequest` has as the request says them."""
_PATIENCE: dict[Mode, float] = {"hold": 20.0, "provisional": 5.0, "keep": 1.0}
"""Seconds to wait for a lost link when the text is complete, in hold since text waits to be
verified; clients and proxies give up after 30 to 60."""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request: one `AnswerRequest` for each choice."""

    asks: tuple[AnswerRequest, ...]
    model: str | None
    stream: bool
    resumable: bool


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """The server's defaults and limits for requests."""

    mode: Mode = "keep"
    patience: float | None = None
    """Seconds; None: what suits the request's mode."""
    max_choices: int = 16


def decode(body: bytes, decoder: msgspec.json.Decoder[Parsed]) -> Parsed:
    """Parse a JSON body; an `ApiError` that names the field for one that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # The validator says what is wrong, then where: "... - at `$.messages[0].role`".
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        choices = _CHOICES.get(param or "", ())
        raise bad(in_our_words(message, param or "the body", choices), param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}") from None


def content_text(content: Content, where: str) -> str:
    """The text of a message, whose content is a text or a list of parts. An `ApiError` that names
    the field (`where`) for parts that are no text, such as pictures."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise bad(
                f"{where}: only text parts are supported, not {part.type!r}",
                where,
                "unsupported_content",
            )
        texts.append(part.text)
    return "".join(texts)


def said_text(role: str, content: Content, where: str) -> str:
    """The text of a message of this role; an `ApiError` where a question or an instruction has none,
    as a program sends that filled in nothing. An answer that calls tools need not have one."""
    if content is None and role in ("system", "developer", "user"):
        raise bad(f"{where}: a message of the role {role} needs a text", where)
    return content_text(content, where)


def chat_role(role: str, where: str) -> str:
    """A role that chat templates know; `developer` is the newer name of `system`."""
    if role not in ("system", "developer", "user", "assistant"):
        raise bad(
            f"{where}: the role is system, developer, user, assistant or tool, not {role!r}",
            f"{where}.role",
        )
    return "system" if role == "developer" else role


def answer_format(given: dict[str, Any] | None, where: str) -> Grammar | None:
    """The grammar that an answer must match by a request's `response_format`, or by `text.format`
    of the responses route; None if it asks for none. `where` names the field, for errors."""
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
    """Refuse a request that sets any of these fields. An empty object sets one: it asks for what
    the field is about, with every default."""
    for name in names:
        if getattr(request, name, None) not in (None, False, ""):
            raise unsupported(name)


def token_limit(name: str, *asked: int | None) -> int | None:
    """The number of tokens that an answer may have: the first of these limits that the request
    sets, and None (until the model ends it) for -1 or where it sets none. `name` is the field, for
    errors."""
    for limit in asked:
        if limit is None:
            continue
        if limit == 0:
            raise bad(f"{name} must be 1 or more, or -1 for no limit, not 0", name)
        return None if limit == -1 else limit
    return None


def biases(given: dict[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    """The biases of a request's `logit_bias`, as pairs of a token id and what is added to its
    logit; None if it has none. In JSON the ids are texts: they are names of fields."""
    if not given:
        return None
    found = []
    for id, bias in given.items():
        is_id = id.isascii() and id.isdecimal() and len(id) < 10
        if not is_id:
            raise bad(f"logit_bias: {id[:40]!r} is no token id", "logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise bad(f"logit_bias: a bias must be -100 to 100, not {bias}", "logit_bias")
        found.append((int(id), bias))
    tokens = {token for token, _ in found}
    if len(found) > MAX_BIASED or len(tokens) < len(found):
        raise bad(f"logit_bias: at most {MAX_BIASED} tokens, each once", "logit_bias")
    return tuple(found)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables that a request gives to the chat template. Names that have a meaning of their
    own are refused, `chat_template` among them: a template in a request would be a program."""
    for name in given or {}:
        if not name.isidentifier() or name in _NO_VARIABLES or name.endswith("_token"):
            raise bad(
                f"chat_template_kwargs: {name!r} cannot be set here", f"chat_template_kwargs.{name}"
            )
    return given or {}


def question_of(request: TextRequest, **more: Any) -> Question:
    """The question, with what all routes say of it alike."""
    prediction = ""
    if request.prediction:
        prediction = content_text(request.prediction.content, "prediction.content")
    template = template_variables(request.chat_template_kwargs)
    return Question(prediction=prediction, template=template, **more)


def answer_request(
    request: TextRequest, question: Question, defaults: Defaults, *, choice: int = 0, **more: Any
) -> AnswerRequest:
    """The request for one answer, that of number `choice` if a request wants several. `more` are
    the fields whose names or meaning differ between the routes. A temperature that is too small to
    divide by is greedy."""
    asked = {}
    for name in _AS_ASKED:
        value = getattr(request, name, None)  # a field that not all routes have
        if value is not None:
            asked[name] = value
    if asked.get("temperature", MIN_TEMPERATURE) < MIN_TEMPERATURE:
        asked["temperature"] = 0.0
    if "top_k" in asked:
        asked["top_k"] = max(0, asked["top_k"])  # -1 is off, too
    ours = request.moa or Extension()
    mode = ours.mode or defaults.mode
    patience = ours.patience
    if patience is None:
        patience = defaults.patience
    if patience is None:
        patience = _PATIENCE[mode]
    return AnswerRequest(
        question=question,
        seed=_seed_of(request, choice),
        mode=mode,
        patience=patience,
        **asked,
        **more,
    )


def _seed_of(request: TextRequest, choice: int) -> int:
    """The seed of the answer of number `choice`: the request's seed plus that number, so that
    several answers differ; or a random one. It is not negative."""
    seed: int | None = getattr(request, "seed", None)  # a field that not all routes have
    if seed is None:
        return random.SystemRandom().getrandbits(_RANDOM_SEED_BITS)
    return (seed + choice) & MAX_SEED


_RANDOM_SEED_BITS = 62


def common_fields(request: TextRequest) -> dict[str, Any]:
    """What a parsed request of every route has, but for what is asked."""
    resumable = bool(request.stream and request.moa and request.moa.resumable)
    return {"model": request.model, "stream": bool(request.stream), "resumable": resumable}
