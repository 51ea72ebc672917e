"""Running states of a text by how many of its tokens they stand for, so that a rejected draft can be
taken back.

A layer with a running state keeps nothing of single tokens: its state goes on from an earlier one or
not at all. Some earlier ones are kept, all of the latest tokens and ever fewer further back, so that
whatever is taken back, about as many tokens are run again as were taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from moa.graph.step import Float, no_states

_MEMORY = 2**28
"""Bytes of all kept states."""
_FEWEST = 6
_MOST = 24


class StateHistory:
    """Kept states of one text."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._nothing = no_states(shapes)
        size = sum(state.nbytes for state in self._nothing)
        self._most = max(_FEWEST, min(_MOST, _MEMORY // max(1, size)))
        self._kept: dict[int, list[Float]] = {}
        """By the number of tokens, in order."""
        self._unused: list[list[Float]] = []

    def latest(self, tokens: int) -> int:
        """The most tokens, at most so many, after which a state is known; 0 before any."""
        return max((at for at in self._kept if at <= tokens), default=0)

    def step(self, start: int, stop: int) -> tuple[list[Float], list[Float]]:
        """Return two lists of arrays for a step over the tokens `start` to `stop` of the text: the
        running states before it, which must be known, and those into which the step is to write the
        states after it. States behind `start` were of another text, and are forgotten."""
        for at in [at for at in self._kept if at > start]:
            self._unused.append(self._kept.pop(at))
        if len(self._kept) >= self._most:
            self._unused.append(self._kept.pop(self._least_useful(stop)))
        # Arrays of states that were given up are used again: they may be large.
        after = self._unused.pop() if self._unused else no_states(self._shapes)
        before = self._kept[start] if start else self._nothing
        self._kept[stop] = after
        return before, after

    def _least_useful(self, end: int) -> int:
        """Which of the kept states to give up when the text is `end` tokens long, as its number of
        tokens: the one that is missed the least, because its neighbours are close to each other,
        compared with their distance from the end."""
        places = [0, *self._kept, end]
        worth = {
            places[i]: (places[i + 1] - places[i - 1]) / (end - places[i])
            for i in range(1, len(places) - 2)  # never the newest: a step goes on from it
        }
        return min(worth, key=lambda place: worth[place])
