"""Services that take conversations and nothing else: how each is asked to go on with an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from cloud_verifier.upstream.contract import Continuation, Dialect, Ending, Piece, UpstreamError
from cloud_verifier.upstream.joining import Anew, Behind, Join, Told, Way
from cloud_verifier.upstream.lines import (
    choices,
    ending,
    events,
    openai_usage,
    text_of,
    usage_of,
)

_GO_ON = (
    "Your previous message was cut off. Go on exactly where it stops, in the same style and format. "
    "Write only what comes next: no introduction, no apology, and nothing of it again."
)
_SHORT = 16
"""Characters of an answer that are asked for again sooner than told: they cost nothing, and whether
a service goes on behind so few or begins anew could not be seen."""
_MORE_TOKENS = 64
"""An answer from its beginning may need other tokens than the device's for the same text."""


class Chat(Dialect):
    """`POST /v1/chat/completions`, which goes on with a last message of the assistant's, as
    llama-server, OpenRouter and our own endpoints do; where it begins anew, that is seen."""

    name = "chat"
    takes: Literal["tokens", "text", "chat"] = "chat"
    optional: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_completion_tokens",
        "seed": "random_seed",
        "random_seed": "",
        "temperature": "",
        "top_p": "",
        "top_k": "",
        "min_p": "",
        "repetition_penalty": "",
        "stream_options": "",
        "response_format": "",
    }
    continues = True
    trusted = False

    def path(self) -> str:
        """OpenAI's route."""
        return "chat/completions"

    def ways(self, asked: Continuation) -> Sequence[Way]:
        """Best first."""
        if not asked.messages:
            raise UpstreamError(
                "the upstream takes chats only, and this prompt is none", later=False
            )
        if not asked.begun:
            return ("anew",)
        if asked.grammar is not None and self.continues:
            return ("anew", "behind", "told")  # the service's own grammar begins with the answer
        if not self.continues:
            return ("anew", "told")
        if len(asked.begun) < _SHORT and not self.trusted:
            return ("anew", "behind", "told")
        return ("behind", "anew", "told")

    def join(self, asked: Continuation) -> Join:
        """Where its answer joins the one that has begun."""
        if asked.way == "behind":
            doubted = not self.trusted and len(asked.begun) >= _SHORT
            return Behind(asked.begun, doubted=doubted)
        return Anew(asked.begun) if asked.way == "anew" else Told(asked.begun)

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """OpenAI's names; others, which some services refuse, only where they are set."""
        sampling = asked.sampling
        body: dict[str, object] = {
            "model": model,
            "messages": conversation(asked),
            "max_tokens": most_tokens(asked),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature,
            "seed": sampling.seed % 2**31,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        if (schema := asked.schema) is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            }
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Chunks with `delta`. What a model thinks beside its answer is no part of it."""
        async for choice in choices(lines):
            delta = choice.get("delta")
            text = text_of(delta.get("content")) if isinstance(delta, dict) else ""
            yield Piece(text=text, ending=ending(choice), usage=openai_usage(choice))


class ChatVllm(Chat):
    """vLLM's and SGLang's chats: going on is asked for by name."""

    name = "chat-vllm"
    trusted = True

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """With their own two fields."""
        more: dict[str, object] = {}
        if asked.way == "behind":
            more = {"continue_final_message": True, "add_generation_prompt": False}
        return super().body(asked, model) | more


class ChatPrefix(Chat):
    """Mistral's and DeepSeek's (below /beta) chats: the last message is marked as a prefix."""

    name = "chat-prefix"
    trusted = True

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """With the mark."""
        body = super().body(asked, model)
        if asked.way == "behind":
            *before, last = conversation(asked)
            body["messages"] = [*before, {**last, "prefix": True}]
        return body


class ChatWhole(Chat):
    """Chats that write whole answers only, as OpenAI's and Gemini's do."""

    name = "chat-whole"
    continues = False


class Anthropic(Chat):
    """Anthropic's `POST /v1/messages`: whole answers, as its newer models refuse to go on behind a
    last message."""

    name = "anthropic"
    continues = False
    optional: ClassVar[Mapping[str, str]] = {"temperature": "", "top_p": "", "top_k": ""}

    def path(self) -> str:
        """Its own route."""
        return "messages"

    def headers(self, key: str) -> dict[str, str]:
        """Its own."""
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Its own names; what the system says has a place of its own."""
        sampling = asked.sampling
        told = conversation(asked)
        system = [message["content"] for message in told if message["role"] == "system"]
        body: dict[str, object] = {
            "model": model,
            "messages": [message for message in told if message["role"] != "system"],
            "max_tokens": most_tokens(asked),
            "stream": True,
            "temperature": sampling.temperature,
        }
        if system:
            body["system"] = "\n\n".join(system)
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Events with a text's delta; the message's own delta says why it ended."""
        read = 0
        async for event in events(lines):
            message = event.get("message")
            if isinstance(message, dict):
                begun = usage_of(message.get("usage"), "input_tokens", "output_tokens")
                read = begun.read if begun is not None else 0
            delta = event.get("delta")
            if not isinstance(delta, dict):
                continue
            counted = {"input_tokens": read} | (event.get("usage") or {})
            endings: dict[Any, Ending] = {
                None: "",
                "end_turn": "eos",
                "stop_sequence": "eos",
                "max_tokens": "length",
            }
            reason = delta.get("stop_reason")
            yield Piece(
                text=text_of(delta.get("text")),
                ending=endings.get(reason, "cut"),
                usage=usage_of(counted, "input_tokens", "output_tokens"),
            )
            if reason is not None:
                return


def conversation(asked: Continuation) -> list[dict[str, str]]:
    """The messages that are sent."""
    told = [{"role": message.role, "content": message.content} for message in asked.messages]
    if told[-1]["role"] == "assistant":
        told.pop()  # it is the beginning of what has begun
    if asked.way == "behind":
        told.append({"role": "assistant", "content": asked.begun.rstrip()})
    elif asked.way == "told":
        told.append({"role": "assistant", "content": asked.begun.rstrip()})
        told.append({"role": "user", "content": _GO_ON})
    return told


def most_tokens(asked: Continuation) -> int:
    """Tokens of the answer at most, those included that are there already where they come again."""
    again = 2 * asked.begun_tokens + _MORE_TOKENS if asked.way == "anew" and asked.begun else 0
    return asked.most + again
