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
from moa.api.errors import bad
from moa.api.parts import within_thinking
from moa.api.tools import ToolFormat, Tools, listed
from moa.chat_window import ANSWER_ROOM, fitting, prompt_room
from moa.errors import MoaError
from moa.grammar.spec import Grammar
from moa.wire.limits import Limits

_CHARACTERS_A_TOKEN = 64
"""A prompt with more characters for each token of the context is refused unread. Texts have 2 to 6
a token."""
_PREDICTED_CHARACTERS_A_TOKEN = 16
"""Characters of a prediction that are tokenized for each token of it that is used."""
_PREDICTED_MARGIN = 256
"""Tokens of a prediction beyond twice the answer."""
_TOOLS_LEAVE = 8
"""Tools that are only offered must leave an eighth of the context."""


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
    tokenizer: Tokenizing,
    ask: AnswerRequest,
    *,
    context: int,
    vocabulary: int,
    longest: int,
    limit: str = "",
) -> Encoded:
    """Put a question into tokens, with the grammar that its answer must match. Prompt and answer
    must fit into `context` tokens, and an answer has `longest` at most: a prompt that is too long
    loses its oldest turns, if it may, or is an `ApiError`. Where `context` is no context but one
    more than prompts may have, `limit` is the limit's name. Tokenizing runs in threads."""
    try:
        return await _encoded(
            tokenizer, ask, context=context, vocabulary=vocabulary, longest=longest
        )
    except _TooLong as error:
        bound = f"the context holds {context} tokens"
        if limit:
            bound = f"a prompt has {context - 1} tokens at most ({limit})"
        raise bad(f"{error}, and {bound}", code="context_length_exceeded") from None


class _TooLong(MoaError):
    """A prompt that does not fit; its text is a clause that says how long it is."""


async def _encoded(
    tokenizer: Tokenizing, ask: AnswerRequest, *, context: int, vocabulary: int, longest: int
) -> Encoded:
    """As `encoded`; a `_TooLong` where the prompt is too long."""
    question = ask.question
    _check_grammar(ask, ask.grammar)
    left_out = 0
    if question.ids is not None:
        prompt = _Prompt(question.ids)
    else:
        question, prompt, left_out = await _fitted(tokenizer, ask, context, longest)
    _check_ids(prompt.ids, context, vocabulary)
    _check_biases(ask, vocabulary)
    grammar = ask.grammar
    text_is_free = grammar is None
    if question.tools is not None:
        grammar = ToolFormat.of(tokenizer.template).grammar(question.tools, grammar)
        _check_grammar(ask, grammar)
        text_is_free = text_is_free and question.tools.choice in ("auto", "none")
    predicted: Sequence[int] = ()
    if question.prediction:
        room = min(longest, context - len(prompt.ids))
        predicted = await asyncio.to_thread(_predicted, tokenizer, question.prediction, room)
    return Encoded(
        ids=prompt.ids,
        prediction=predicted,
        # Where the text must match a grammar there is no room for thinking.
        thinking=prompt.thinking and text_is_free,
        grammar=grammar,
        left_out=left_out,
        messages=prompt.messages,
    )


async def _fitted(
    tokenizer: Tokenizing, ask: AnswerRequest, context: int, longest: int
) -> tuple[Question, _Prompt, int]:
    """Put a question into a prompt that fits into the context. Returns the question without the
    tools that it may lose for that, the prompt, and how many of its oldest messages were left
    out."""
    question = ask.question
    room = sys.maxsize
    if question.may_trim:
        room = prompt_room(context, min(longest, ask.max_tokens or ANSWER_ROOM))
    question, unread = await asyncio.to_thread(_readable, question, context)
    prompt, left_out = await asyncio.to_thread(_prompt, tokenizer, question, room)
    tools_are_offered = question.tools is not None and question.tools.choice == "auto"
    if tools_are_offered and len(prompt.ids) > context - context // _TOOLS_LEAVE:
        # Apps such as Open WebUI offer dozens of tools with every message: a short context is for
        # the messages.
        question = replace(question, tools=None)
        prompt, left_out = await asyncio.to_thread(_prompt, tokenizer, question, room)
    return question, prompt, left_out + unread


def whole_prompt(tokenizer: Tokenizing, question: Question, context: int) -> Sequence[int]:
    """The prompt of a question in tokens, from which nothing is left out; an `ApiError` for one
    that is so long that it is not read. It may take long."""
    try:
        readable, _ = _readable(replace(question, may_trim=False), context)
    except _TooLong as error:
        why = f"{error}, and the context holds {context} tokens"
        raise bad(why, code="context_length_exceeded") from None
    prompt, _ = _prompt(tokenizer, readable, sys.maxsize)
    return prompt.ids


def _predicted(tokenizer: Tokenizing, prediction: str, room: int) -> Sequence[int]:
    """The tokens of what a client predicts of an answer, which has `room` tokens at most; as many
    as are of use."""
    # An edit may skip parts of the prediction, so it may be longer than the answer.
    most = 2 * room + _PREDICTED_MARGIN
    text = prediction[: most * _PREDICTED_CHARACTERS_A_TOKEN]
    return tokenizer.plain(text)[:most]


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
    """The prompt of a question in tokens, and how many of its oldest messages were left out so that
    it has `room` tokens at most."""
    if question.messages is None:
        return _Prompt(tokenizer.encode(question.text or "")), 0
    form = ToolFormat.of(tokenizer.template)
    tools = question.tools or Tools(())
    offered = []
    if form.knows_tools and tools.choice != "none":
        offered = [listed(tool) for tool in tools.tools]

    def encode(sent: Sequence[Mapping[str, Any]]) -> _Prompt:
        """The prompt that these messages make, up to the beginning of the answer. Where the last
        message is one of the assistant's, the answer goes on with it."""
        messages = form.messages(sent, tools)
        begun = ""
        last = messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            # As llama.cpp's server and vLLM can: the model goes on with the last message.
            messages = messages[:-1]
            begun = last["content"]
        text = tokenizer.chat(messages, {**question.template, "tools": offered or None})
        return _Prompt(
            ids=tokenizer.plain(text + begun),
            thinking=within_thinking(text, begun),
            messages=form.for_service(sent, tools),
        )

    return fitting(question.messages, room, encode)


def _readable(question: Question, context: int) -> tuple[Question, int]:
    """The question without tools and oldest messages that are so long that they cannot fit into the
    context, and how many messages were left out. So nothing is tokenized in vain; a `_TooLong` if
    what must stay is too long, too."""
    most = context * _CHARACTERS_A_TOKEN
    left_out = 0
    question = _without_long_tools(question, most)
    text = question.text or ""
    if question.messages is not None:
        room = most if question.may_trim else sys.maxsize
        (text, sent), left_out = fitting(question.messages, room, _as_characters)
        question = replace(question, messages=sent)
    if len(text) > most:
        raise _TooLong(f"the prompt has {len(text)} characters")
    return question, left_out


def _without_long_tools(question: Question, most: int) -> Question:
    """The question without tools that have more than `most` characters, if they are only offered; a
    `_TooLong` if the answer must call one."""
    tools = question.tools
    if tools is None or tools.choice == "none":
        return question
    size = len(msgspec.json.encode(tools.tools))
    if size <= most:
        return question
    if tools.choice != "auto":
        raise _TooLong(f"the tools have {size} characters")
    return replace(question, tools=None)


def _as_characters(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """About the characters of a chat, for `fitting`; and its messages."""
    return "".join(str(message) for message in messages), messages


def _check_biases(ask: AnswerRequest, vocabulary: int) -> None:
    """Refuse biases of tokens that there are not."""
    for token, _ in ask.logit_bias or ():
        if token >= vocabulary:
            raise bad(
                f"logit_bias: there is no token {token}: the model has {vocabulary} tokens",
                "logit_bias",
            )


def _check_ids(ids: Sequence[int], context: int, vocabulary: int) -> None:
    """Raise an `ApiError` for a prompt that is empty or has ids that are no tokens of the model, a
    `_TooLong` for one that leaves no room in the context for an answer."""
    if not ids:
        raise bad("the prompt is empty", "prompt")
    if len(ids) >= context:
        raise _TooLong(f"the prompt has {len(ids)} tokens")
    if max(ids) >= vocabulary:
        raise bad(f"there is no token {max(ids)}: the model has {vocabulary} tokens", "prompt")


def _check_grammar(ask: AnswerRequest, grammar: Grammar | None) -> None:
    """Raise an error for a grammar that the verifier would refuse: one that is not well-formed, or
    that comes with `ignore_eos`."""
    if grammar is None:
        return
    grammar.check()
    if ask.ignore_eos:
        raise bad(
            "a grammar says where the text ends: it cannot be used with ignore_eos", "ignore_eos"
        )
