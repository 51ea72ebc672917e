"""How each engine is asked to go on, and how its answer is read.

Each asks for exactly our sampling: what an engine would add by default (llama-server's top-k of 40
and min-p of 0.05) is switched off by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from cloud_verifier.upstream.chats import (
    Anthropic,
    Chat,
    ChatPrefix,
    ChatVllm,
    ChatWhole,
)
from cloud_verifier.upstream.contract import Continuation, Dialect, Ending, Piece, UpstreamError
from cloud_verifier.upstream.lines import choices, ending, events, objects, text_of, token_ids
from moa.errors import UsageError


class LlamaServer(Dialect):
    """llama.cpp's server: `POST /completion` with token ids; it keeps the prompt's KV cache."""

    name = "llama-server"
    takes: Literal["tokens", "text", "chat"] = "tokens"

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../completion"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Its own names, and its own defaults switched off."""
        sampling = asked.sampling
        schema = asked.schema
        return ({} if schema is None else {"json_schema": schema}) | {
            "model": model,
            "prompt": list(asked.ids),
            "n_predict": asked.most,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(asked.ids) + asked.most,
            "seed": sampling.seed % 2**32,
        }

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Events with `tokens`; the last one says why it stopped."""
        async for event in events(lines):
            ids = token_ids(event.get("tokens"))
            if not event.get("stop"):
                yield Piece(ids=ids)
                continue
            endings: dict[Any, Ending] = {"eos": "eos", "limit": "length"}
            yield Piece(ids=ids, ending=endings.get(event.get("stop_type"), "cut"))
            return


class Vllm(Dialect):
    """vLLM's `POST /v1/completions` with token ids, which it also returns (0.11 and later)."""

    name = "vllm"
    takes: Literal["tokens", "text", "chat"] = "tokens"

    def path(self) -> str:
        """OpenAI's route."""
        return "completions"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """OpenAI's names, and vLLM's own fields."""
        sampling = asked.sampling
        schema = asked.schema
        more = {} if schema is None else {"structured_outputs": {"json": schema}}
        return (
            _openai_body(asked, model, prompt=list(asked.ids))
            | more
            | {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "return_token_ids": True,
            }
        )

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Chunks whose choice has `token_ids`."""
        async for choice in choices(lines):
            if "token_ids" not in choice and choice.get("text"):
                raise UpstreamError(
                    "the upstream tells no token ids",
                    later=False,
                    hint="use vLLM 0.11 or later, or --upstream-api completions",
                )
            yield Piece(ids=token_ids(choice.get("token_ids")), ending=ending(choice))


class Sglang(Dialect):
    """SGLang's `POST /generate` with `input_ids`. Held to its documented interface: no exchange
    with a running server has been recorded."""

    name = "sglang"
    takes: Literal["tokens", "text", "chat"] = "tokens"

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../generate"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Its own names."""
        sampling = asked.sampling
        schema = asked.schema
        return {
            "input_ids": list(asked.ids),
            "stream": True,
            "sampling_params": {
                "max_new_tokens": asked.most,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "sampling_seed": sampling.seed,
                "skip_special_tokens": False,
                **({} if schema is None else {"json_schema": msgspec.json.encode(schema).decode()}),
            },
        }

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Events with `output_ids`: all so far, or with --incremental-streaming-output the new
        ones."""
        known: tuple[int, ...] = ()
        async for event in events(lines):
            ids = token_ids(event.get("output_ids"))
            new = ids[len(known) :] if known and ids[: len(known)] == known else ids
            known += new
            meta = event.get("meta_info") or {}
            reason = meta.get("finish_reason") if isinstance(meta, dict) else None
            kind = reason.get("type") if isinstance(reason, dict) else reason
            endings: dict[Any, Ending] = {None: "", "stop": "eos", "length": "length"}
            yield Piece(ids=new, ending=endings.get(kind, "cut"))


class Completions(Dialect):
    """Any `POST /v1/completions` that takes a text as it is, without a chat template: vLLM, SGLang,
    llama-server, our own endpoints and many others."""

    name = "completions"
    takes: Literal["tokens", "text", "chat"] = "text"

    def path(self) -> str:
        """OpenAI's route."""
        return "completions"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """OpenAI's names; others, which some services refuse, only where they are set."""
        sampling = asked.sampling
        body = _openai_body(asked, model, prompt=asked.text)
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Chunks with `text`."""
        async for choice in choices(lines):
            yield Piece(text=text_of(choice.get("text")), ending=ending(choice))


class Ollama(Dialect):
    """Ollama's `POST /api/generate` in raw mode: no template is applied."""

    name = "ollama"
    takes: Literal["tokens", "text", "chat"] = "text"

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../api/generate"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Its own names."""
        sampling = asked.sampling
        schema = asked.schema
        return ({} if schema is None else {"format": schema}) | {
            "model": model,
            "prompt": asked.text,
            "raw": True,
            "stream": True,
            "options": {
                "num_predict": asked.most,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "seed": sampling.seed % 2**32,
            },
        }

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """An object a line; the last one is `done`."""
        async for event in objects(lines):
            text = text_of(event.get("response"))
            if not event.get("done"):
                yield Piece(text=text)
                continue
            endings: dict[Any, Ending] = {"stop": "eos", "length": "length"}
            yield Piece(text=text, ending=endings.get(event.get("done_reason"), "cut"))
            return


DIALECTS: dict[str, type[Dialect]] = {
    kind.name: kind
    for kind in (
        LlamaServer,
        Vllm,
        Sglang,
        Completions,
        Ollama,
        Chat,
        ChatVllm,
        ChatPrefix,
        ChatWhole,
        Anthropic,
    )
}
_OWNERS = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang", "library": "ollama"}
"""Who owns the models in an engine's own list."""
_HOSTS = {
    "api.openai.com": "chat-whole",
    "generativelanguage.googleapis.com": "chat-whole",
    "api.anthropic.com": "anthropic",
    "api.mistral.ai": "chat-prefix",
    "api.deepseek.com": "chat-prefix",
    "openrouter.ai": "chat",
}
"""Services that take chats alone."""


def dialect(name: str, owner: str = "", host: str = "") -> Dialect:
    """The dialect of this name; `auto`: by the service's name, or by who owns its models, else any
    completions."""
    if name == "auto":
        name = _HOSTS.get(host) or _OWNERS.get(owner, "completions")
    if name not in DIALECTS:
        raise UsageError(
            f"unknown interface {name!r} of an upstream", hint=f"auto, {', '.join(DIALECTS)}"
        )
    return DIALECTS[name]()


def _openai_body(asked: Continuation, model: str, *, prompt: object) -> dict[str, object]:
    sampling = asked.sampling
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": asked.most,
        "stream": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
