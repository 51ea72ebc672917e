"""An answer of a chat that is to be verified later: what it says, and how it is asked for again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from edge_client.cli.dialogue import Dialogue, DialogueMessage, Unverified
from edge_client.conversation import Conversation
from edge_client.events import AnswerSoFar, Event, Prompt, Retract, Token
from edge_client.screen.words import first_words
from edge_client.text.codec import TextCodec
from moa.grammar.spec import Grammar
from moa.safe_text import safe_line
from moa.text_stream import TextStream

_QUOTED = 30
"""Characters of a question by which its answer is named."""


class WrittenAnswer:
    """An answer of which the device has written a part alone, or that goes on from one of those."""

    def __init__(
        self,
        dialogue: Dialogue,
        message: DialogueMessage,
        told: AnswerSoFar,
        *,
        grammar: Grammar | None = None,
        is_wanted: bool = True,
    ) -> None:
        """Note an answer that has just ended, with the settings and the system message that it was
        asked for with: they may be others later. `message` holds its text in the dialogue, and
        `told` which of its tokens are verified. It matches the `grammar`. One that the user has
        stopped is not `is_wanted`: it is not checked."""
        self._dialogue = dialogue
        self.message = message
        self.told = told
        self.is_wanted = is_wanted
        self._grammar = grammar
        self._opening = dialogue.opening()
        self._changes = dict(dialogue.changes)
        self.begun = message["content"].removesuffix(
            told.done.text if told.done else told.text_of()
        )
        """What an earlier turn had written of the message."""

    @classmethod
    def loaded(
        cls, dialogue: Dialogue, saved: Unverified, codec: TextCodec, grammar: Grammar | None
    ) -> WrittenAnswer:
        """Returns an answer of a conversation that was loaded. A file has its text and not its
        tokens, nor the settings that it was asked for with: those of now count. It is not checked
        where the tokenizer does not make the same text of it."""
        text = saved.message["content"]
        told = _told_of(text, codec, saved.verified_characters)
        is_same = told.text_of() == text
        return cls(
            dialogue,
            saved.message,
            told,
            grammar=grammar,
            is_wanted=saved.is_wanted and is_same,
        )

    @property
    def saved(self) -> Unverified:
        """What a file says of it."""
        verified = None
        if self.unverified:
            verified = len(self.begun) + len(self.told.text_of(0, self.told.final))
        return Unverified(self.message, self.unverified, verified, self.is_wanted)

    @property
    def is_held(self) -> bool:
        """Whether it is still in the dialogue."""
        return self._dialogue.holds(self.message)

    @property
    def unverified(self) -> int:
        """Tokens of it that are not verified."""
        return self.told.unverified

    @property
    def is_complete(self) -> bool:
        """Whether it came to an end of its own."""
        return self.told.done is not None and self.told.done.reason in ("eos", "stop")

    @property
    def name(self) -> str:
        """What the user may call it: the last one, or by its question."""
        if not self.is_held:
            return "an earlier answer"
        if self._dialogue.messages[-1] is self.message:
            return "the last answer"
        before = self._dialogue.before(self.message)
        if not before:  # a file may begin with it
            return "the first answer"
        return f'the answer to "{safe_line(first_words(before[-1]["content"], _QUOTED))}"'

    def replace(self, told: AnswerSoFar, text: str) -> None:
        """Let it be what a check has made of it, with this text."""
        self.told = told.copy()
        self._dialogue.correct(self.message, self.begun + text)

    def confirm(self, told: AnswerSoFar, count: int) -> None:
        """Note that so many of its first tokens are as a check has told them, and final."""
        self.told.statuses[:count] = told.statuses[:count]
        self.told.final = max(self.told.final, count)

    def stands_behind_another(self) -> None:
        """Note that the text before it has changed: none of its tokens is verified behind the new
        one."""
        told = self.told
        told.statuses = ["provisional"] * len(told.ids)
        told.final = 0
        if told.done is not None:
            told.done = msgspec.structs.replace(told.done, verified=False)

    def cut_to_verified(self) -> list[int]:
        """Take the unverified end out of the message; returns its tokens. Call it when no check
        runs."""
        told = self.told
        self._dialogue.correct(self.message, self.begun + told.text_of(0, told.final))
        return told.ids[told.final :]

    async def asked_again(
        self, conversation: Conversation, told: AnswerSoFar
    ) -> AsyncGenerator[Event, None]:
        """Ask for it once more, behind the dialogue as it is now, with the tokens that a check has
        `told` as its beginning: the verifier checks them. Yields what changes in them."""
        written = list(told.ids)
        known = len(written)
        begun = [{"role": "assistant", "content": self.begun}] if self.begun else []
        events = conversation.generate(
            [*self._opening, *self._dialogue.before(self.message), *begun],
            written=written,
            rechecks=True,  # a slow verifier takes its time
            grammar=self._grammar,
            **self._changes,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Prompt):  # not before: it may be refused
                    told.done = None
                if isinstance(event, Token) and known:
                    known -= 1  # it is told once more what was written
                    continue
                if isinstance(event, Retract):
                    known = 0
                yield event


def _told_of(text: str, codec: TextCodec, verified_characters: int | None) -> AnswerSoFar:
    """Returns a text as an answer that was told, of which so many characters are verified; None:
    all, and its end."""
    told = AnswerSoFar()
    stream = TextStream(codec)
    for token in codec.encode_behind(text):
        told.ids.append(token)
        told.texts.append(stream.add(token))
        is_verified = verified_characters is None or len(stream.text) <= verified_characters
        told.statuses.append("verified" if is_verified else "provisional")
    if not told.ids:
        return told
    told.texts[-1] += stream.flush()
    if verified_characters is not None:
        told.statuses[-1] = "provisional"  # where all of its text is verified, its end is not
    told.final = (*told.statuses, "provisional").index("provisional")
    return told
