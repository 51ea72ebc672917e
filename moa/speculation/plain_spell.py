"""A spell of rounds that are plain without a decision, after plain decoding was best for all. Pure: no clock.

To look at a text is work too: a tenth of a round beside a small target, and more the more texts there are, while a
draft gains less. A decision follows from what is typical of many rounds, and so does not change at once.
"""

from __future__ import annotations

_LONGEST, _MEASURED, _TOGETHER = 32, 8, 4
"""Rounds of a spell: one for every so many measured rounds, or so many texts that share them, up to a limit."""
_SAMPLE = 16
"""One of so many rounds of a spell is measured, and stands for all of them: beside a small target, whose round takes a
few milliseconds, learning from each would cost 2 %."""
_ALIKE = 0.25
"""Share of a batch that may come, go or be new without a look at it."""


class PlainSpell:
    """Whether the next round is one of a spell, and whether it is to be recorded."""

    def __init__(self) -> None:
        self._left = 0
        self._texts, self._new = 0, 0
        """Texts of the round that the spell was decided for, and those that began since."""
        self._sample = 1
        self.stands_for = 1
        """Rounds that the latest planned one is an example of."""

    def begin(self, texts: int, rounds: int) -> None:
        """Plain decoding is best for these texts, by the costs of so many measured rounds."""
        length = min(_LONGEST, max(rounds // _MEASURED, texts // _TOGETHER))
        self._sample = _SAMPLE if length >= _SAMPLE else 1
        self._left, self._texts, self._new = length // self._sample * self._sample, texts, 0

    def text_began(self) -> None:
        """A text of which the decision knew nothing."""
        self._new += 1

    def covers(self, texts: int) -> bool:
        """Whether a round of so many texts is plain without a look at any of them: one more of the spell is used."""
        changed = max(abs(texts - self._texts), self._new)
        if not self._left or changed > _ALIKE * self._texts:
            self._left, self.stands_for = 0, 1
            return False
        self._left -= 1
        self.stands_for = self._sample
        return True

    @property
    def measured(self) -> bool:
        """Whether the latest planned round is to be recorded: most of a spell say nothing new."""
        return self._left % self._sample == 0
