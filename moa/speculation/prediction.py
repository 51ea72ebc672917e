"""Drafts from a text that the user expects: an edited file is mostly the same as before. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from moa.text_stream import common_prefix

_ANCHOR = 4
"""Tokens that the answer and the prediction must share before the prediction is used (again)."""
_MISSES = 3
"""After so many guesses in a row without an accepted token others guess, until twice as many tokens
are shared."""
_WORTH_TELLING = 16
"""Tokens beyond those that the verifier has been told, which are worth another message."""
_TOKEN_BYTES = array("i").itemsize


class Prediction:
    """Aligns the answer with a predicted text, also after they differed. Without an index: a search
    through the bytes of thousands of tokens takes microseconds."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """Use these tokens as the prediction of an answer that has not begun."""
        self._tokens = list(tokens)
        self._bytes = _as_bytes(self._tokens)
        self._position = 0
        """Position in the prediction that the answer had reached when they last agreed."""
        self._misses = 0
        """Guesses in a row of which no token was accepted."""
        self.told: list[int] = []
        """What the verifier has been told of it and has not decided on: tokens that begin behind
        the answer."""

    def after(self, output: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that are predicted after `output`, the answer so far; none if its
        end is not in the prediction, or if the prediction was wrong too often lately."""
        position = self._position_after(output)
        if position is None:
            return []
        if self._misses >= _MISSES and not self._share_many(output, position):
            return []
        self._position = position
        return self._tokens[position : position + limit]

    def tell(self, output: Sequence[int], limit: int) -> list[int]:
        """What to tell the verifier now: nothing while it knows enough of the text."""
        found = self.after(output, limit)
        if self.told and len(found) < len(self.told) + _WORTH_TELLING:
            return []
        self.told = found
        return found

    def decided(self, tokens: Sequence[int]) -> int:
        """Note that the answer goes on with these tokens, and return how many of them are what the
        verifier had been told."""
        if not self.told:
            return 0
        accepted = common_prefix(self.told, list(tokens))
        differ = accepted < min(len(self.told), len(tokens))
        self._misses = 0 if accepted else self._misses + 1
        self.told = [] if differ else self.told[accepted:]
        return accepted

    def _share_many(self, output: Sequence[int], position: int) -> bool:
        """Whether twice as many tokens as usual agree, at the answer's end and before `position`."""
        length = 2 * _ANCHOR
        if position < length:
            return False
        return list(output[-length:]) == self._tokens[position - length : position]

    def _position_after(self, output: Sequence[int]) -> int | None:
        """The position in the prediction at which the answer goes on: behind a place where the
        prediction has the answer's last tokens (an anchor). None if there is no such place."""
        if list(output) == self._tokens[: len(output)]:
            return len(output)
        if len(output) < _ANCHOR:
            return None
        anchor = _as_bytes(output[-_ANCHOR:])
        # The nearest match after the last position, so that skipped text stays skipped; else the
        # last match of all.
        start = self._find(anchor, max(0, self._position - _ANCHOR))
        if start is None:
            start = self._find_last(anchor)
        return None if start is None else start + _ANCHOR

    def _find(self, anchor: bytes, first: int) -> int | None:
        """The position of the first match that begins at position `first` or later."""
        offset = self._bytes.find(anchor, _TOKEN_BYTES * first)
        while offset >= 0 and offset % _TOKEN_BYTES:  # begins within a token: no match
            offset = self._bytes.find(anchor, offset + 1)
        return offset // _TOKEN_BYTES if offset >= 0 else None

    def _find_last(self, anchor: bytes) -> int | None:
        """The position of the last match."""
        offset = self._bytes.rfind(anchor)
        while offset >= 0 and offset % _TOKEN_BYTES:  # begins within a token: no match
            # The second number is where a match must end, at the latest: one byte earlier.
            offset = self._bytes.rfind(anchor, 0, offset + len(anchor) - 1)
        return offset // _TOKEN_BYTES if offset >= 0 else None


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
