"""What programs ask of a server's tokenizer and limits: `/tokenize`, `/detokenize` and `/props`, in the
fields of llama.cpp's server and of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from moa.api.answer import Question
from moa.api.completions import ChatMessage, messages_of
from moa.api.encoding import Tokenizing, whole_prompt
from moa.api.errors import bad
from moa.api.requests import TemplateVariables, decode, template_variables, unsupported
from moa.api.tools import Tool, chosen
from moa.wire.messages import TokenId

_CHARACTERS_A_TOKEN = 64
"""A text with more characters for each token of the context is refused unread."""


class TokenTexts(Tokenizing, Protocol):
    """A tokenizer that also knows the text of ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""


class _TokenizeRequest(msgspec.Struct):
    """Body of `/tokenize`: either server's fields."""

    content: str | None = None
    """As llama.cpp's server has it, which adds no start token unless told to."""
    add_special: bool | None = None
    """Whether to add a start token to `content`."""
    prompt: str | None = None
    """As vLLM has it, which adds a start token unless told not to."""
    add_special_tokens: bool | None = None
    """Whether to add a start token to `prompt`."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    """As vLLM has it: a chat, in the tokens that the chat route makes of it."""
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    """What `messages` may call."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables for the chat template of `messages`."""
    add_generation_prompt: bool | None = None
    """Whether the beginning of an answer belongs to `messages`: always, here."""


class _DetokenizeRequest(msgspec.Struct):
    """Body of `/detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=2**20)]


_tokenize_of = msgspec.json.Decoder(_TokenizeRequest)
_detokenize_of = msgspec.json.Decoder(_DetokenizeRequest)


def tokenized(body: bytes, tokenizer: TokenTexts, context: int) -> dict[str, Any]:
    """The answer of `/tokenize`: the ids of a request's text. It may take long, and is to be called
    in a thread."""
    request = decode(body, _tokenize_of)
    if request.content is not None:
        text = request.content
        with_start = bool(request.add_special)
    elif request.prompt is not None:
        text = request.prompt
        with_start = request.add_special_tokens is not False
    elif request.messages is not None:
        return _told(whole_prompt(tokenizer, _chat(request, request.messages), context), context)
    else:
        raise bad("content (or prompt or messages, as vLLM has it) is missing", "content")
    if len(text) > context * _CHARACTERS_A_TOKEN:
        raise bad(f"a text of {len(text)} characters is too long for a context of {context}")
    return _told(tokenizer.encode(text) if with_start else tokenizer.plain(text), context)


def _chat(request: _TokenizeRequest, messages: Sequence[ChatMessage]) -> Question:
    """The chat of a request, as the chat route would have it."""
    if request.add_generation_prompt is False:
        raise unsupported("add_generation_prompt")
    return Question(
        messages=messages_of(messages),
        template=template_variables(request.chat_template_kwargs),
        tools=chosen(None, request.tools, None),
    )


def _told(ids: Sequence[int], context: int) -> dict[str, Any]:
    return {"tokens": list(ids), "count": len(ids), "max_model_len": context}


def detokenized(body: bytes, tokenizer: TokenTexts, vocabulary: int) -> dict[str, Any]:
    """The text of ids; to be called in a thread."""
    ids = decode(body, _detokenize_of).tokens
    if ids and max(ids) >= vocabulary:
        raise bad(f"there is no token {max(ids)}: the model has {vocabulary} tokens", "tokens")
    text = tokenizer.decode(ids)
    return {"content": text, "prompt": text}


def properties(model: str, tokenizer: TokenTexts, context: int, slots: int) -> dict[str, Any]:
    """The answer of `/props`: what clients of llama.cpp's server read before they use one."""
    return {
        "default_generation_settings": {"n_ctx": context, "params": {"n_predict": -1}},
        "total_slots": slots,
        "model_alias": model,
        "model_path": model,
        "chat_template": tokenizer.template,
        "modalities": {"vision": False, "audio": False},
        "build_info": "moa-edge",
    }
