"""What programs ask of a server's tokenizer and limits: `/tokenize`, `/detokenize` and `/props`, in the
fields of llama.cpp's server and of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from moa.api.encoding import Tokenizing
from moa.api.errors import bad
from moa.api.requests import decode
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
    else:
        raise bad("content (or prompt, as vLLM has it) is missing", "content")
    if len(text) > context * _CHARACTERS_A_TOKEN:
        raise bad(f"a text of {len(text)} characters is too long for a context of {context}")
    ids = list(tokenizer.encode(text) if with_start else tokenizer.plain(text))
    return {"tokens": ids, "count": len(ids), "max_model_len": context}


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
