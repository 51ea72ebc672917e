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
        """Begin an empty chat, whose messages become ids by the chat template and tokenizer of
        `codec`."""
        self._codec = codec
        self.messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        """The ids of the chat so far."""
        self._text = ""
        """The text of the ids, special tokens included."""
        self._answer_start = 0
        """Position of the latest answer's first id."""
        self._text_before_answer = ""
        """The text of the prompt that the latest answer belongs to."""
        self._awaits_answer = False
        """Whether the latest question has no answer yet."""
        self._continued = ""
        """The text that the latest answer goes on from, if the user had an earlier one continued."""
        self._left_out = 0
        """How many of the oldest messages are no longer sent because the context is full."""

    def ask(self, messages: Messages, room: int | None = None) -> tuple[list[int], int]:
        """Returns the ids of the chat up to the start of the assistant's next answer, and how many
        messages were newly left out. If the ids are more than `room`, the oldest messages are left
        out. If the last message is the assistant's, the answer continues it."""
        self.messages = [dict(message) for message in messages]
        self._continued = ""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self._continued = self.messages[-1]["content"]
        left_out_before = self._left_out
        if room is None:
            room = sys.maxsize
        (ids, text), self._left_out = fitting(self.messages, room, self._prompt_of)
        self._ids = ids
        self._text = text
        self._answer_start = len(ids)
        self._awaits_answer = True
        # Fewer are left out than before when the user has gone back to a shorter conversation.
        newly_left_out = max(0, self._left_out - left_out_before)
        return list(ids), newly_left_out

    @property
    def sent(self) -> list[dict[str, str]]:
        """The messages that the latest prompt was made of."""
        first = 0  # of the messages that may be left out: those of the system at the start stay
        while first < len(self.messages) and self.messages[first]["role"] == "system":
            first += 1
        return self.messages[:first] + self.messages[first + self._left_out :]

    def _prompt_of(self, messages: Messages) -> tuple[list[int], str]:
        """Returns the ids and the text of these messages, up to the start of the assistant's
        answer."""
        if messages and messages[-1]["role"] == "assistant":
            text = self._codec.chat(messages[:-1]) + messages[-1]["content"]
        else:
            text = self._codec.chat(messages)
        if self._text and text.startswith(self._text):
            # Only the new part is tokenized: the ids before it stay as they are in the KV caches.
            return self._ids + self._codec.plain(text[len(self._text) :]), text
        return self._codec.plain(text), text

    def answered(self, ids: Sequence[int], text: str) -> None:
        """Add the assistant's answer to the chat, or correct the one that was added before; `ids`
        are all ids of the chat."""
        if self._awaits_answer:
            self._awaits_answer = False
            self._text_before_answer = self._text
            if not self._continued:  # else the answer goes on in the last message
                self.messages.append({})
        self.messages[-1] = {"role": "assistant", "content": self._continued + text}
        # With special tokens: the next prompt is compared with the text as the template writes it.
        answer = self._codec.decode(ids[self._answer_start :], skip_special=False)
        self._text = self._text_before_answer + answer
        self._ids = list(ids)


def prompt_ids(
    codec: TextCodec,
    prompt: str | Messages,
    *,
    raw: bool = False,
    chat: ChatLog | None = None,
    room: int | None = None,
) -> tuple[list[int], int]:
    """Returns the ids of a prompt, and how many of the oldest messages were newly left out because
    the ids would be more than `room`.

    A text is the user's next message in `chat`, or with `raw` the whole prompt, without a template.
    A list of messages is the whole chat.
    """
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
