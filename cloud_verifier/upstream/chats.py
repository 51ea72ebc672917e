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
        """Returns the ways to ask a chat service for what follows, the best one first: behind the
        answer so far as its last message, anew from the answer's beginning, or told in words to go
        on. An error for a prompt that is no conversation."""
        if not asked.messages:
            raise UpstreamError(
                "the upstream takes chats only, and this prompt is none", later=False
            )
        if not asked.begun:
            return ("anew",)
        if not self.continues:
            return ("anew", "told")
        # A service's own grammar begins where the service begins to write.
        has_grammar = asked.grammar is not None
        is_short = len(asked.begun) < _SHORT and not self.trusted
        if has_grammar or is_short:
            return ("anew", "behind", "told")
        return ("behind", "anew", "told")

    def join(self, asked: Continuation) -> Join:
        """Returns what finds the new text in an answer that was asked for in this way: the service
        may repeat text that is there already."""
        if asked.way == "behind":
            doubted = not self.trusted and len(asked.begun) >= _SHORT
            return Behind(asked.begun, doubted=doubted)
        if asked.way == "anew":
            return Anew(asked.begun)
        return Told(asked.begun)

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request, with OpenAI's names; fields that some services refuse are
        there only where they are set."""
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
        body |= other_sampling(asked)
        if asked.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": asked.schema},
            }
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer, each a `delta` of its text. What a model thinks beside
        its answer is in another field, and is left out."""
        async for choice in choices(lines):
            delta = choice.get("delta")
            text = text_of(delta.get("content")) if isinstance(delta, dict) else ""
            yield Piece(text=text, ending=ending(choice), usage=openai_usage(choice))


class ChatVllm(Chat):
    """vLLM's and SGLang's chats: going on is asked for by name."""

    name = "chat-vllm"
    trusted = True

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request, with the two fields that ask vLLM to go on behind the last
        message."""
        body = super().body(asked, model)
        if asked.way == "behind":
            body["continue_final_message"] = True
            body["add_generation_prompt"] = False
        return body


class ChatPrefix(Chat):
    """Mistral's and DeepSeek's (below /beta) chats: the last message is marked as a prefix."""

    name = "chat-prefix"
    trusted = True

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request, whose last message has the mark of a prefix if it is to be
        gone on with."""
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
        """Returns the JSON of a request with Anthropic's names, in which the system's messages have
        a place of their own."""
        sampling = asked.sampling
        system: list[str] = []
        others: list[dict[str, str]] = []
        for message in conversation(asked):
            if message["role"] == "system":
                system.append(message["content"])
            else:
                others.append(message)
        body: dict[str, object] = {
            "model": model,
            "messages": others,
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
        """Yield the pieces of the answer: most events have a `delta` of its text, the last delta
        says why it ended, and the first event how many tokens were read."""
        endings: dict[Any, Ending] = {
            None: "",
            "end_turn": "eos",
            "stop_sequence": "eos",
            "max_tokens": "length",
        }
        read = 0
        async for event in events(lines):
            message = event.get("message")
            if isinstance(message, dict):
                begun = usage_of(message.get("usage"), "input_tokens", "output_tokens")
                read = begun.read if begun is not None else 0
            delta = event.get("delta")
            if not isinstance(delta, dict):
                continue
            # Later events tell only what was written.
            counted = {"input_tokens": read} | (event.get("usage") or {})
            reason = delta.get("stop_reason")
            yield Piece(
                text=text_of(delta.get("text")),
                ending=endings.get(reason, "cut"),
                usage=usage_of(counted, "input_tokens", "output_tokens"),
            )
            if reason is not None:
                return


def conversation(asked: Continuation) -> list[dict[str, str]]:
    """Returns the messages for a chat service: the conversation, with the answer so far behind it
    if it is to be gone on with, and with a request in words to go on if that is the way."""
    messages = [{"role": message.role, "content": message.content} for message in asked.messages]
    if messages[-1]["role"] == "assistant":
        messages.pop()  # it is the beginning of what has begun
    if asked.way in ("behind", "told"):
        # Services refuse space at the end, or cut it off.
        messages.append({"role": "assistant", "content": asked.begun.rstrip()})
    if asked.way == "told":
        messages.append({"role": "user", "content": _GO_ON})
    return messages


def most_tokens(asked: Continuation) -> int:
    """Returns how many tokens the service may write: those that are wanted, and those of the answer
    so far if the service has to write it once more."""
    if asked.way != "anew" or not asked.begun:
        return asked.most
    # The service's tokenizer may need twice as many tokens as the device's for the same text.
    written_again = 2 * asked.begun_tokens + _MORE_TOKENS
    return asked.most + written_again


def other_sampling(asked: Continuation) -> dict[str, object]:
    """Returns the sampling settings that OpenAI does not have and some services refuse, as far as
    they are set."""
    sampling = asked.sampling
    fields: dict[str, object] = {}
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        fields["repetition_penalty"] = sampling.repetition_penalty
    return fields
