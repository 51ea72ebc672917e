"""Drafts from a text that the user expects: an edited file is mostly the same as before. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_ANCHOR = 4
"""Tokens that the answer and the prediction must share before the prediction is used (again)."""
_MISSES = 3
"""After so many drafts in a row without an accepted token the drafter drafts, until twice as many
tokens are shared."""


class Prediction:
    """Aligns the answer with a predicted text, also after they differed. Without an index: a search
    through the bytes of thousands of tokens takes microseconds."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._bytes = _bytes(self._tokens)
        self._at = 0
        """Position in the prediction that the answer had reached when they last agreed."""
        self._misses = 0

    def after(self, output: Sequence[int], limit: int) -> list[int]:
        """At most `limit` predicted tokens after `output`; none if the answer differs from the
        prediction here."""
        at = len(output) if list(output) == self._tokens[: len(output)] else self._found(output)
        if at is None or (self._misses >= _MISSES and not self._sure(output, at)):
            return []
        self._at = at
        return self._tokens[at : at + limit]

    def judged(self, accepted: int) -> None:
        """Number of tokens of the last draft that were accepted."""
        self._misses = 0 if accepted else self._misses + 1

    def _sure(self, output: Sequence[int], at: int) -> bool:
        length = 2 * _ANCHOR
        return at >= length and list(output[-length:]) == self._tokens[at - length : at]

    def _found(self, output: Sequence[int]) -> int | None:
        """The end of the nearest match after the last position, so that skipped text stays skipped;
        else of the last match."""
        anchor = _bytes(output[-_ANCHOR:])
        if len(output) < _ANCHOR:
            return None
        place = self._bytes.find(anchor, _WIDTH * max(0, self._at - _ANCHOR))
        while place % _WIDTH and place >= 0:  # between two tokens
            place = self._bytes.find(anchor, place + 1)
        if place < 0:
            place = self._bytes.rfind(anchor)
            while place % _WIDTH and place >= 0:
                place = self._bytes.rfind(anchor, 0, place + len(anchor) - 1)
        return None if place < 0 else place // _WIDTH + _ANCHOR


_WIDTH = array("i").itemsize


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
