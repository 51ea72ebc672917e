"""Incremental decoding: the text of a growing list of tokens. Tokens can be removed; stop strings
are never shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

_Text = TypeVar("_Text", list[int], str)


def common_prefix(a: _Text, b: _Text) -> int:
    """How many items two lists or texts begin with alike. It is found by bisection: comparisons of
    slices run at C's speed, a loop over items does not."""
    low = 0
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # The first `low` are known to be the same; the answer is between `low` and `high`.
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
    """The text that a token adds behind the tokens `before` it. It is decoded together with the
    last of these: many tokenizers say only there whether a space belongs to it."""
    last = list(before[-1:])
    last_text = codec.decode(last)
    both = codec.decode([*last, token])
    if not both.startswith(last_text):
        return codec.decode([token])
    return both[len(last_text) :]


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
    """The text that was decoded, held back parts included."""
    _ids: list[int] = field(default_factory=list)
    _marks: list[_Mark] = field(default_factory=lambda: [_Mark()])
    """The state before the first token, then after each token."""

    @property
    def text(self) -> str:
        """The text that may be shown."""
        return self._raw[: self._marks[-1].shown]

    def add(self, token: int) -> str:
        """Add a token, and return the text that may be shown because of it: often none, where a
        character is not complete or a stop string may have begun."""
        self._ids.append(token)
        mark = self._marks[-1]
        new = self._undecoded(mark)
        if not new or new.endswith("\ufffd"):
            # Nothing yet, or the first bytes of a character: decoded again with the next token.
            self._marks.append(mark)
            return ""
        self._raw += new
        shown, stopped = self._visible(mark)
        self._marks.append(
            _Mark(
                context=mark.decoded,
                decoded=len(self._ids),
                length=len(self._raw),
                shown=shown,
                stopped=stopped,
            )
        )
        return self._raw[mark.shown : shown]

    def _undecoded(self, mark: _Mark) -> str:
        """The text of the tokens that are not in `_raw`, as it is after the tokens before them."""
        before = self.codec.decode(self._ids[mark.context : mark.decoded])
        both = self.codec.decode(self._ids[mark.context :])
        return both[len(before) :]

    def cut(self, tokens: int) -> int:
        """Remove all but the first `tokens`; returns the number of characters that remain."""
        del self._ids[tokens:], self._marks[tokens + 1 :]
        self._raw = self._raw[: self._marks[-1].length]
        return self._marks[-1].shown

    def flush(self) -> str:
        """Return the text that was held back, because it could have become a stop string or a
        longer character; call it when the last token was added. A character of which only the first
        bytes are there is left out: they stand for none."""
        mark = self._marks[-1]
        if mark.stopped:
            return ""
        self._raw += self._undecoded(mark).rstrip("\ufffd")
        end, _ = self._find_stop(mark.shown)
        self._marks[-1] = dataclasses.replace(mark, shown=end)
        return self._raw[mark.shown : end]

    def _visible(self, before: _Mark) -> tuple[int, bool]:
        """How much of the text may be shown, and whether a stop string ends it."""
        if before.stopped:
            return before.shown, True
        end, stopped = self._find_stop(before.shown)
        if not stopped:
            end -= self._length_of_begun_stop(before.shown)
        return end, stopped

    def _length_of_begun_stop(self, start: int) -> int:
        """Length of the longest end of the text, from `start` on, that begins a stop string."""
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for tail_start in range(max(start, len(self._raw) - longest), len(self._raw)):
            tail = self._raw[tail_start:]
            if any(stop.startswith(tail) for stop in self.stop):
                return len(tail)
        return 0

    def _find_stop(self, start: int) -> tuple[int, bool]:
        """Where the first stop string begins, else the end of the text; and whether there is one.
        Only from `start` on: text already shown contains no beginning of a stop string."""
        places = [self._raw.find(stop, start) for stop in self.stop]
        found = [place for place in places if place >= 0]
        if not found:
            return len(self._raw), False
        return min(found), True


@dataclass(frozen=True, slots=True)
class _Mark:
    """State of the stream after a token."""

    context: int = 0
    """The token with which decoding the next one begins."""
    decoded: int = 0
    """How many tokens are in the text; others, after them, end within a character."""
    length: int = 0
    """The text's length, held back parts included."""
    shown: int = 0
    """How much of the text may be shown."""
    stopped: bool = False
    """Whether a stop string was found, which ends the text."""
