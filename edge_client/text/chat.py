"""A chat as ids that only grow: earlier text is not rendered and tokenized again, so both ends keep
its KV cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from edge_client.text.codec import TextCodec
from moa.chat_window import fitting
from moa.errors import UsageError

Messages = Sequence[Mapping[str, str]]


class ChatLog:
    """The messages of a conversation, and their ids."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        self._text = ""
        """The text of the ids, special tokens included."""
        self._start, self._prompt, self._question = 0, "", False
        """Start of the latest answer, the text before it, and whether it is still missing."""
        self._begun = ""
        """What the latest answer began with, if an earlier one is continued."""
        self._left_out = 0
        """How many of the oldest messages are no longer sent because the context is full."""

    def ask(self, messages: Messages, room: int | None = None) -> tuple[list[int], int]:
        """The ids up to the start of the assistant's next answer, and how many messages were newly
        left out so that there are at most `room`. A last message of the assistant's is continued."""
        self.messages = [dict(message) for message in messages]
        last = self.messages[-1] if self.messages else {}
        self._begun = last["content"] if last.get("role") == "assistant" else ""
        before = self._left_out
        no_limit = sys.maxsize
        (ids, text), self._left_out = fitting(
            self.messages, no_limit if room is None else room, self._prompt_of
        )
        self._ids = ids
        self._text = text
        self._start = len(ids)
        self._question = True
        return list(ids), max(0, self._left_out - before)

    @property
    def sent(self) -> list[dict[str, str]]:
        """The messages that the latest prompt was made of."""
        kept = [at for at, one in enumerate(self.messages) if one["role"] != "system"]
        first = kept[0] if kept else len(self.messages)
        return [*self.messages[:first], *self.messages[first + self._left_out :]]

    def _prompt_of(self, messages: Messages) -> tuple[list[int], str]:
        if messages and messages[-1]["role"] == "assistant":
            text = self._codec.chat(messages[:-1]) + messages[-1]["content"]
        else:
            text = self._codec.chat(messages)
        if self._text and text.startswith(self._text):
            return self._ids + self._codec.plain(text[len(self._text) :]), text
        return self._codec.plain(text), text

    def answered(self, ids: Sequence[int], text: str) -> None:
        """Add the assistant's answer as shown, or as corrected later; `ids` are all ids of the
        chat."""
        if self._question:
            self._prompt = self._text
            self._question = False
            if not self._begun:
                self.messages.append({})
        self.messages[-1] = {"role": "assistant", "content": self._begun + text}
        self._text = self._prompt + self._codec.decode(ids[self._start :], skip_special=False)
        self._ids = list(ids)


def prompt_ids(
    codec: TextCodec,
    prompt: str | Messages,
    *,
    raw: bool = False,
    chat: ChatLog | None = None,
    room: int | None = None,
) -> tuple[list[int], int]:
    """The ids of a prompt, and how many messages were left out for the `room`: a text is the user's
    next message in `chat`, unless `raw`; a list is the whole chat."""
    chat = chat or ChatLog(codec)
    if not isinstance(prompt, str):
        return chat.ask(prompt, room)
    if not prompt.strip():
        raise empty_prompt()
    if raw or not codec.can_chat:
        return codec.encode(prompt), 0
    return chat.ask([*chat.messages, {"role": "user", "content": prompt}], room)


def empty_prompt() -> UsageError:
    """The error for an empty prompt."""
    return UsageError("the prompt is empty", hint="give it as an argument or on standard input")
