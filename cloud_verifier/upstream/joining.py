"""Where an answer of a chat service joins the text that is there already. Pure.

A service may go on behind a text, begin the same answer anew, or be told in words to go on. Each
way has its own danger: text twice, another text, or an introduction. What comes out here follows
the text that is there, or `ContradictedError` says that it cannot, before anything has come out.
"""

from __future__ import annotations

from typing import Literal, Protocol

from moa.text_stream import common_prefix

Way = Literal["behind", "anew", "told"]
"""How the service is asked: behind a last message of the assistant's, without it, or with a request
to go on after it."""

_SUSPICIOUS = 64
"""Characters of the answer's beginning that no continuation repeats by chance."""
_SHORTEST_OVERLAP = 8
_LONGEST_OVERLAP = 400
"""Characters of the text's end that a model told to go on may say again."""


class ContradictedError(Exception):
    """The service has written another text than the one that is there: nothing has come out."""


class Join(Protocol):
    """The new text of an answer that comes in pieces."""

    def add(self, text: str) -> str:
        """What is certainly new."""

    def rest(self) -> str:
        """What was kept back: the answer has ended."""


class AsItIs:
    """Everything is new."""

    def add(self, text: str) -> str:
        """The same text."""
        return text

    def rest(self) -> str:
        """Nothing is kept back."""
        return ""


class Behind:
    """An answer that continues the last message, whose text is `begun`.

    Space at the end of that text is not sent, as templates cut it off and some services refuse it;
    the answer brings it once more. A service may also begin its answer anew instead of continuing
    it: where that is to be feared (`doubted`), the answer is held back until it differs from the
    text.
    """

    def __init__(self, begun: str, *, doubted: bool) -> None:
        self._begun = begun if doubted else ""
        """The text that the service may repeat; empty where that is not to be feared."""
        self._space = begun[len(begun.rstrip()) :]
        """Space at the end of the text that is there, which was not sent."""
        self._kept = ""
        """Text of the answer that has not come out yet."""
        self._decided = False
        """Whether it is known what the answer repeats: from then on everything is new."""

    def add(self, text: str) -> str:
        """Take in a piece of the answer, and return what is new in it; nothing while the answer is
        kept back, because it may be a repetition."""
        if self._decided:
            return text
        self._kept += text
        if self._may_be_repetition():
            return ""
        return self._decide()

    def rest(self) -> str:
        """Return what was kept back: the answer has ended within it."""
        if self._decided:
            return ""
        return self._decide()

    def _may_be_repetition(self) -> bool:
        """Whether all of the answer so far may be what was there before: the space that was not
        sent, or the beginning of the text."""
        if self._space and not self._kept.strip():
            return True
        return self._begun.startswith(self._kept) and self._kept != self._begun

    def _decide(self) -> str:
        """Return what is new in the text that was kept back. If its beginning is the text that is
        there, the service has begun anew, and what is new comes behind that; else it has gone on,
        at most with the space again that was not sent. A `ContradictedError` if it has begun anew
        and writes another text."""
        repeated = common_prefix(self._kept, self._begun)
        if _SUSPICIOUS <= repeated < len(self._begun):
            raise ContradictedError
        self._decided = True
        if self._begun and repeated == len(self._begun):
            return self._kept[repeated:]
        return self._kept[common_prefix(self._kept, self._space) :]


class Anew:
    """The answer from its beginning: what is there must come first, to the letter."""

    def __init__(self, begun: str) -> None:
        self._begun = begun
        self._repeated = 0
        """Characters of the text that is there that the answer has said again."""

    def add(self, text: str) -> str:
        """Take in a piece of the answer, and return what comes after the text that is there; a
        `ContradictedError` where the answer is another one."""
        known = self._begun[self._repeated : self._repeated + len(text)]
        if text[: len(known)] != known:
            raise ContradictedError
        self._repeated += len(known)
        return text[len(known) :]

    def rest(self) -> str:
        """Nothing is kept back. An answer that ends before the text that is there is another one."""
        if self._repeated < len(self._begun):
            raise ContradictedError
        return ""


class Told:
    """After a request in words to go on: the last words may come again, and a space is missing
    between two words, since a service's answer begins with none."""

    def __init__(self, begun: str) -> None:
        self._begun = begun
        self._kept = ""
        """Text of the answer that has not come out yet."""
        self._decided = False
        """Whether it is known what the answer repeats: from then on everything is new."""

    def add(self, text: str) -> str:
        """Take in a piece of the answer, and return what is new in it. The answer is kept back
        while it may repeat the last words of the text that is there, or all of that text."""
        if self._decided:
            return text
        self._kept += text
        is_short = len(self._kept) < _LONGEST_OVERLAP
        may_repeat_the_end = self._kept in self._begun[-_LONGEST_OVERLAP:]
        may_repeat_all = self._begun.startswith(self._kept)
        if is_short and (may_repeat_the_end or may_repeat_all):
            return ""
        return self._decide()

    def rest(self) -> str:
        """Return what was kept back: the answer has ended within it."""
        if self._decided:
            return ""
        return self._decide()

    def _decide(self) -> str:
        """Returns what is new in the text that was kept back: without what it repeats of the text's
        end, and with a space where two words would run into each other."""
        self._decided = True
        longest = min(len(self._kept), len(self._begun), _LONGEST_OVERLAP)
        for length in range(longest, _SHORTEST_OVERLAP - 1, -1):
            if self._begun.endswith(self._kept[:length]):
                return self._kept[length:]
        if common_prefix(self._kept, self._begun) >= _SUSPICIOUS:
            raise ContradictedError  # it has begun again, and differs somewhere
        needs_space = self._begun[-1:].isalnum() and self._kept[:1].isalnum()
        return f" {self._kept}" if needs_space else self._kept
