"""An upstream's text as the device's tokens.

The engine behind may have any tokenizer: positions in the session's log are the device's own. A
text is encoded as it comes, in pieces that end where a token of the whole text ends, so that the
tokens are those that the device would have written, and as many as the engine's own where its
tokenizer is the same; the text that they decode to is the upstream's in any case. The first piece
of an answer is not kept back: somebody waits for it, and no text of the device stands there that it
should be compared with, token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from cloud_verifier.upstream.contract import UpstreamError

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]
_LONGEST_WORD = 64
"""Characters without a boundary that are kept back at most."""
_MOST_LOOKS = 8
"""Boundaries at the end of what came that are tried: each costs the encoding of the text before it."""


class TokensOfText:
    """Encodes a text that comes in pieces."""

    def __init__(self, encode: Encode, decode: Decode, *, begins: bool = False) -> None:
        """Both without special tokens: a text that looks like one is text. `begins`: the text is an
        answer from its beginning."""
        self._encode = encode
        self._decode = decode
        self._begins = begins
        self._kept = ""

    def add(self, text: str) -> list[int]:
        """Take in a piece of text, and return the tokens of all words that are complete now. At an
        answer's beginning that is all of the piece, so that its first text is shown at once."""
        self._kept += text
        end = self._end_of_complete()
        is_first = self._begins and bool(self._kept.strip())
        is_too_long = end == 0 and len(self._kept) > _LONGEST_WORD
        if is_first or is_too_long:
            end = len(self._kept)
        if is_first:
            self._begins = False
        complete = self._kept[:end]
        self._kept = self._kept[end:]
        return self._tokens(complete)

    def rest(self) -> list[int]:
        """Return the tokens of what was kept back: the text has ended."""
        complete = self._kept
        self._kept = ""
        return self._tokens(complete)

    def _end_of_complete(self) -> int:
        """Returns how much of the kept text has the tokens already that it has in the whole. Where a
        word ends, a token may not: most tokenizers have one for a colon with the line break behind
        it."""
        whole: list[int] = []
        for end in itertools.islice(_boundaries(self._kept), _MOST_LOOKS):
            whole = whole or self._tokens(self._kept)
            part = self._tokens(self._kept[:end])
            if whole[: len(part)] == part:
                return end
        return 0

    def _tokens(self, text: str) -> list[int]:
        """Returns tokens that decode to exactly this part of a text; an error if the device's
        tokenizer has none."""
        if not text:
            return []
        ids = list(self._encode(text))
        if self._decode(ids) == text:
            return ids
        # Some tokenizers put a space before a text. Behind a line break they do not.
        anchor = list(self._encode("\n"))
        ids = list(self._encode("\n" + text))
        if ids[: len(anchor)] != anchor or self._decode(ids) != self._decode(anchor) + text:
            raise UpstreamError(
                "the device's tokenizer cannot take this text in pieces", later=False
            )
        return ids[len(anchor) :]


def _boundaries(text: str) -> Iterator[int]:
    """Yields the places at which a text may be cut, the last one first: in front of a space, or
    behind a character of a script without spaces. No other place is looked at: a word's end is
    where most tokenizers cut, whatever comes."""
    for place in range(len(text) - 1, 0, -1):
        before = text[place - 1]
        if before.isspace():
            continue
        is_cjk = before > "\u2e7f"  # Chinese, Japanese and Korean characters begin behind it
        if text[place].isspace() or is_cjk:
            yield place
