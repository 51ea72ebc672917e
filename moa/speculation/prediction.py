"""Drafts from a text that the user expects: an edited file is mostly the same as before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_ANCHOR = 4
"""Tokens that the answer and the prediction must share before the prediction is used (again)."""
_MISSES = 3
"""After so many drafts in a row without an accepted token the drafter drafts, until twice as many tokens are shared."""


class Prediction:
    """Aligns the answer with a predicted text, also after they differed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(_ANCHOR, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - _ANCHOR : end]), []).append(end)
        self._at = 0
        """Position in the prediction that the answer had reached when they last agreed."""
        self._misses = 0

    def after(self, output: Sequence[int], limit: int) -> list[int]:
        """At most `limit` predicted tokens after `output`; none if the answer differs from the prediction here."""
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
        places = self._places.get(tuple(output[-_ANCHOR:]))
        if not places:
            return None
        # The nearest match after the last position: skipped text stays skipped.
        return next((place for place in places if place >= self._at), places[-1])
