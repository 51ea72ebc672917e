"""A text that the user expects, offered as a draft: an edited file is mostly the file as it was. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_ANCHOR = 4
"""Tokens that the answer and the prediction must share for the prediction to be followed (again)."""
_MISSES = 3
"""Drafts in a row of which nothing was accepted; then the drafter is asked, until twice the anchor is shared."""


class Prediction:
    """Follows an answer along a predicted text, and finds the way back after a difference."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(_ANCHOR, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - _ANCHOR : end]), []).append(end)
        self._at = 0
        """Where the answer stands in the prediction, when it stood there last."""
        self._misses = 0

    def after(self, output: Sequence[int], limit: int) -> list[int]:
        """At most `limit` predicted tokens after `output`; none where the answer has left the prediction."""
        at = len(output) if list(output) == self._tokens[: len(output)] else self._found(output)
        if at is None or (self._misses >= _MISSES and not self._sure(output, at)):
            return []
        self._at = at
        return self._tokens[at : at + limit]

    def judged(self, accepted: int) -> None:
        """Of the last draft, so many tokens were accepted."""
        self._misses = 0 if accepted else self._misses + 1

    def _sure(self, output: Sequence[int], at: int) -> bool:
        length = 2 * _ANCHOR
        return at >= length and list(output[-length:]) == self._tokens[at - length : at]

    def _found(self, output: Sequence[int]) -> int | None:
        places = self._places.get(tuple(output[-_ANCHOR:]))
        if not places:
            return None
        # The nearest place behind where the answer stood; text that was skipped stays skipped.
        return next((place for place in places if place >= self._at), places[-1])
