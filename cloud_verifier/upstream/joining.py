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
    """Behind a last message. Space at its end is not sent, as templates cut it off and some services
    refuse it; it comes once more. `doubted`: the service may have begun anew instead."""

    def __init__(self, begun: str, *, doubted: bool) -> None:
        self._begun = begun if doubted else ""
        self._space = begun[len(begun.rstrip()) :]
        self._kept = ""
        self._decided = False

    def add(self, text: str) -> str:
        """Kept back only for as long as it reads like the answer's beginning, or is space."""
        if self._decided:
            return text
        self._kept += text
        if self._space and not self._kept.strip():
            return ""
        same = _common(self._kept, self._begun)
        if same == len(self._kept) and same < len(self._begun):
            return ""
        return self._decide(same)

    def rest(self) -> str:
        """It has ended within what was kept back: a repetition, if it is a long one."""
        return "" if self._decided else self._decide(_common(self._kept, self._begun))

    def _decide(self, same: int) -> str:
        if same >= _SUSPICIOUS and same < len(self._begun):
            raise ContradictedError
        self._decided = True
        if self._begun and same == len(self._begun):
            return self._kept[same:]
        return self._kept[_common(self._kept, self._space) :]


class Anew:
    """The answer from its beginning: what is there must come first, to the letter."""

    def __init__(self, begun: str) -> None:
        self._begun = begun
        self._at = 0

    def add(self, text: str) -> str:
        """What comes after the text that is there."""
        known = self._begun[self._at : self._at + len(text)]
        if text[: len(known)] != known:
            raise ContradictedError
        self._at += len(known)
        return text[len(known) :]

    def rest(self) -> str:
        """An answer that ends before the text that is there is another one."""
        if self._at < len(self._begun):
            raise ContradictedError
        return ""


class Told:
    """After a request in words to go on: the last words may come again, and a space is missing
    between two words, since a service's answer begins with none."""

    def __init__(self, begun: str) -> None:
        self._begun = begun
        self._kept = ""
        self._decided = False

    def add(self, text: str) -> str:
        """Kept back for as long as it may be a repetition of the last words, or of everything."""
        if self._decided:
            return text
        self._kept += text
        short = len(self._kept) < _LONGEST_OVERLAP
        may_repeat = self._kept in self._begun[-_LONGEST_OVERLAP:]
        if short and (may_repeat or self._begun.startswith(self._kept)):
            return ""
        return self._decide()

    def rest(self) -> str:
        """It was short."""
        return "" if self._decided else self._decide()

    def _decide(self) -> str:
        self._decided = True
        longest = min(len(self._kept), len(self._begun), _LONGEST_OVERLAP)
        for length in range(longest, _SHORTEST_OVERLAP - 1, -1):
            if self._begun.endswith(self._kept[:length]):
                return self._kept[length:]
        if _common(self._kept, self._begun) >= _SUSPICIOUS:
            raise ContradictedError  # it has begun again, and differs somewhere
        glued = self._begun[-1:].isalnum() and self._kept[:1].isalnum()
        return f" {self._kept}" if glued else self._kept


def _common(one: str, other: str) -> int:
    return common_prefix(one, other)
