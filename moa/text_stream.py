"""Incremental decoding: the text of a growing list of tokens. Tokens can be removed; stop strings
are never shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

_Run = TypeVar("_Run", list[int], str)


def common_prefix(a: _Run, b: _Run) -> int:
    """Length of the common prefix, by bisection over slice comparisons, which run at C speed."""
    low = 0
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""


def text_after(codec: Decoder, before: Sequence[int], token: int) -> str:
    """What a token adds to the text after others; many tokenizers say only there whether a space
    belongs to it."""
    context = list(before[-1:])
    first = codec.decode(context)
    both = codec.decode([*context, token])
    return both[len(first) :] if both.startswith(first) else codec.decode([token])


@dataclass
class TextStream:
    """The text of a growing list of tokens, piece by piece; the last tokens can be removed again.

    A piece is decoded together with the token before it, since many tokenizers join words by
    context. Two things are held back: incomplete characters, and text that may be the beginning of
    a stop string. After a stop string no text follows.
    """

    codec: Decoder
    stop: tuple[str, ...] = ()
    _raw: str = ""
    _ids: list[int] = field(default_factory=list)
    _marks: list[_Mark] = field(default_factory=lambda: [_Mark()])
    """After each token."""

    @property
    def text(self) -> str:
        """The text that may be shown."""
        return self._raw[: self._marks[-1].shown]

    def add(self, token: int) -> str:
        """Add a token; returns the text that it adds."""
        self._ids.append(token)
        mark = self._marks[-1]
        before = self.codec.decode(self._ids[mark.context : mark.done])
        after = self.codec.decode(self._ids[mark.context :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            self._marks.append(mark)
            return ""
        self._raw += after[len(before) :]
        self._marks.append(_Mark(mark.done, len(self._ids), len(self._raw), *self._visible(mark)))
        return self._raw[mark.shown : self._marks[-1].shown]

    def cut(self, tokens: int) -> int:
        """Remove all but the first `tokens`; returns the number of characters that remain."""
        del self._ids[tokens:], self._marks[tokens + 1 :]
        self._raw = self._raw[: self._marks[-1].length]
        return self._marks[-1].shown

    def flush(self) -> str:
        """The text that was held back; call it last. A character of which only the first bytes are
        there is left out: they stand for none."""
        mark = self._marks[-1]
        if mark.stopped:
            return ""
        decoded = self.codec.decode(self._ids[mark.context :])
        new = decoded[len(self.codec.decode(self._ids[mark.context : mark.done])) :]
        self._raw += new.rstrip("\ufffd")
        end, _ = self._find_stop(mark.shown)
        self._marks[-1] = dataclasses.replace(mark, shown=end)
        return self._raw[mark.shown : end]

    def _visible(self, before: _Mark) -> tuple[int, bool]:
        """How much of the text may be shown, and whether a stop string ends it."""
        if before.stopped:
            return before.shown, True
        end, stopped = self._find_stop(before.shown)
        if not stopped:
            # The longest end of the text with which some stop string begins.
            longest = max(map(len, self.stop), default=1) - 1
            tails = (self._raw[at:] for at in range(max(before.shown, end - longest), end))
            end -= next(
                (len(tail) for tail in tails if any(stop.startswith(tail) for stop in self.stop)), 0
            )
        return end, stopped

    def _find_stop(self, start: int) -> tuple[int, bool]:
        """End of the text, and whether a stop string is there. Text already shown contains no
        beginning of a stop string."""
        found = [at for stop in self.stop if (at := self._raw.find(stop, start)) >= 0]
        return (min(found), True) if found else (len(self._raw), False)


@dataclass(frozen=True, slots=True)
class _Mark:
    """State of the stream after a token."""

    context: int = 0
    """Where the decoding context starts."""
    done: int = 0
    """How many tokens are in the text."""
    length: int = 0
    """The text's length, held back parts included."""
    shown: int = 0
    stopped: bool = False
