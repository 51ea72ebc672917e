"""A question in tokens, within bounds: what cannot fit is refused or cut before it is tokenized,
and threads do it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from moa.api.answer import AnswerRequest, Encoded, Question
from moa.api.errors import ApiError, bad
from moa.api.parts import within_thinking
from moa.api.tools import ToolFormat, Tools, listed
from moa.chat_window import ANSWER_ROOM, fitting, prompt_room
from moa.grammar.spec import Grammar
from moa.wire.limits import Limits

_CHARACTERS_A_TOKEN = 64
"""A prompt with more characters for each token of the context is refused unread. Texts have 2 to 6
a token."""
_PREDICTED_CHARACTERS_A_TOKEN = 16


class Tokenizing(Protocol):
    """The tokenizer and chat template of an answerer. Methods may be called from several threads."""

    @property
    def template(self) -> str:
        """The chat template's source; empty if there is none."""

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """The text of a conversation, up to the start of the answer; `template` are variables for
        the template."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, with the tokenizer's start token."""

    def plain(self, text: str) -> Sequence[int]:
        """Ids of a piece from the middle of a text."""


async def encoded(
    tokenizer: Tokenizing, ask: AnswerRequest, *, context: int, vocabulary: int, longest: int
) -> Encoded:
    """The question in tokens. `context` tokens fit, answer included; an answer has at most
    `longest`."""
    question = ask.question
    prompt = _Prompt(())
    left_out = 0
    _check_grammar(ask, ask.grammar)
    if question.ids is None:
        room = (
            prompt_room(context, min(longest, ask.max_tokens or ANSWER_ROOM))
            if question.may_trim
            else sys.maxsize
        )
        question, unread = await asyncio.to_thread(_readable, question, context)
        prompt, left_out = await asyncio.to_thread(_prompt, tokenizer, question, room)
        if (
            question.tools is not None
            and question.tools.choice == "auto"
            and len(prompt.ids) > context - context // 8
        ):
            # Apps such as Open WebUI offer dozens of tools with every message: a short context is
            # for the messages.
            question = replace(question, tools=None)
            prompt, left_out = await asyncio.to_thread(_prompt, tokenizer, question, room)
        left_out += unread
    else:
        prompt = _Prompt(question.ids)
    ids = prompt.ids
    _check_ids(ids, context, vocabulary)
    if (most := max((token for token, _ in ask.logit_bias or ()), default=-1)) >= vocabulary:
        raise bad(
            f"logit_bias: there is no token {most}: the model has {vocabulary} tokens", "logit_bias"
        )
    grammar, free = ask.grammar, ask.grammar is None
    if question.tools is not None:
        _check_grammar(
            ask, grammar := ToolFormat.of(tokenizer.template).grammar(question.tools, grammar)
        )
        free = free and question.tools.choice in ("auto", "none")
    thinking = prompt.thinking and free  # else there is no room for it
    if not question.prediction:
        return Encoded(ids, (), thinking, grammar, left_out, prompt.messages)
    # An edit may skip parts of the prediction, so it may be longer than the answer.
    most = 2 * min(longest, context - len(ids)) + 256
    text = question.prediction[: most * _PREDICTED_CHARACTERS_A_TOKEN]
    predicted = await asyncio.to_thread(tokenizer.plain, text)
    return Encoded(ids, predicted[:most], thinking, grammar, left_out, prompt.messages)


def answer_limit(ask: AnswerRequest, default: int, most: int = Limits.max_new_tokens) -> int:
    """Tokens of the answer at most; a `default` of 0 is until the model ends it. Clients ask for
    more than a verifier writes in one turn: they get what it does."""
    return min(ask.max_tokens or default or most, most)


class _Prompt(NamedTuple):
    """A prompt in tokens, whether it ends within thinking, and as the chat that it is of."""

    ids: Sequence[int]
    thinking: bool = False
    messages: Sequence[Mapping[str, str]] = ()


def _prompt(tokenizer: Tokenizing, question: Question, room: int) -> tuple[_Prompt, int]:
    """The prompt, and how many of its messages were left out."""
    if question.messages is None:
        return _Prompt(tokenizer.encode(question.text or "")), 0
    form = ToolFormat.of(tokenizer.template)
    tools = question.tools or Tools(())
    offered = [listed(tool) for tool in tools.tools if tools.choice != "none" and form.knows_tools]

    def encode(sent: Sequence[Mapping[str, Any]]) -> _Prompt:
        messages = form.messages(sent, tools)
        begun = ""
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            # As llama.cpp's server and vLLM can: the model goes on with the last message.
            messages, begun = messages[:-1], messages[-1]["content"]
        text = tokenizer.chat(messages, {**question.template, "tools": offered or None})
        told = form.as_text(sent, tools)
        return _Prompt(tokenizer.plain(text + begun), within_thinking(text, begun), told)

    return fitting(question.messages, room, encode)


def _readable(question: Question, context: int) -> tuple[Question, int]:
    """The question without the tools and messages that are certain not to fit, and how many
    messages those are; refused if no shorter."""
    most = context * _CHARACTERS_A_TOKEN
    left_out = 0
    if (tools := question.tools) is not None and tools.choice != "none":
        if (size := len(msgspec.json.encode(tools.tools))) > most and tools.choice != "auto":
            raise _too_long(f"the tools have {size} characters", context)
        question = replace(question, tools=tools if size <= most else None)
    text = question.text or ""
    if question.messages is not None:
        room = most if question.may_trim else sys.maxsize
        (text, sent), left_out = fitting(
            question.messages, room, lambda sent: ("".join(map(str, sent)), sent)
        )
        question = replace(question, messages=sent)
    if len(text) > most:
        raise _too_long(f"the prompt has {len(text)} characters", context)
    return question, left_out


def _check_ids(ids: Sequence[int], context: int, vocabulary: int) -> None:
    if not ids:
        raise bad("the prompt is empty", "prompt")
    if len(ids) >= context:
        raise _too_long(f"the prompt has {len(ids)} tokens", context)
    if max(ids) >= vocabulary:
        raise bad(f"there is no token {max(ids)}: the model has {vocabulary} tokens", "prompt")


def _check_grammar(ask: AnswerRequest, grammar: Grammar | None) -> None:
    """What the wire refuses."""
    if grammar is not None:
        grammar.check()
        if ask.ignore_eos:
            raise bad(
                "a grammar says where the text ends: it cannot be used with ignore_eos",
                "ignore_eos",
            )


def _too_long(what: str, context: int) -> ApiError:
    return bad(f"{what}, and the context holds {context} tokens", code="context_length_exceeded")
