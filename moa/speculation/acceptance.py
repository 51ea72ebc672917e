"""How often a text's drafts are accepted: by what is usual for texts of its kind, and by what it was itself.

Beside a target, texts are told apart before the drafter has read them, by how sure the target is of the next token:
where it is sure, a drafter mostly agrees. With the temperature that makes a kind. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

_KEEP, _KEEP_USUAL, _KEEP_SURE = 0.9, 0.97, 0.7
"""Weight that older rounds keep when a new one is added: in a text's acceptance rate; in the usual one, to which only
the first drafts of a text are added, for that is what a new text must be judged by; and in how sure the target is."""
_KINDS = (0.5, 0.8, 0.95)
"""Texts of which the target is less sure than these are of another kind."""
_HOTTEST = 2.0
"""Temperatures above are taken for this one."""
_PRIOR, _WEIGHT = 0.7, 3.0
"""Prior chance that a level is accepted; and the weight in rounds of what is expected before anything was measured:
that prior, or the usual rates. With the weight of one round a single miss ended all drafting; with that of one and a
half, text that a drafter with records of its prompt was right about every second time was left after two."""
FIRST_DRAFTS = 3
"""Drafts of a text that say what is usual: later ones are of texts that drafts do well for, or they would not be."""


@dataclass
class LevelRates:
    """How often each level was reached, given that the level before was; older rounds count less."""

    first: float
    """What is expected of the first before anything was measured."""
    usual: LevelRates | None = None
    """Rates over all texts so far, which a new text starts with."""
    tried: list[float] = field(default_factory=list)
    won: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)
    """Chances computed since the latest round was counted."""

    def add(self, reached: int, levels: int) -> None:
        """Count a round that could reach `levels`, and did reach so many."""
        self.latest = []
        while (known := len(self.tried)) < levels:
            # What is expected of all texts fades as they come; that of one text stays.
            weight = _WEIGHT if self.usual is None else 0.0
            self.won.append(weight * (self.won[-1] / self.tried[-1] if known and weight else self.first))
            self.tried.append(weight)
        keep = _KEEP if self.usual is not None else _KEEP_USUAL
        for level in range(min(reached + 1, levels)):
            self.tried[level] = keep * self.tried[level] + 1
            self.won[level] = keep * self.won[level] + (level < reached)

    def chances(self, deepest: int) -> list[float]:
        """That a level is reached, if the one before was: of those never measured, what the last one that was says."""
        if self.usual is None:
            measured = [won / tried for tried, won in zip(self.tried, self.won, strict=True)]
            return [*measured, *[measured[-1] if measured else self.first] * (deepest - len(measured))][:deepest]
        found: list[float] = []
        before = 0.0
        for level, usual in enumerate(self._expected(deepest)):
            prior = max(before, usual)  # a text that did better than usual so far will go on so
            tried, won = (self.tried[level], self.won[level]) if level < len(self.tried) else (0.0, 0.0)
            found.append(before := (won + _WEIGHT * prior) / (tried + _WEIGHT))
        return found

    def reached(self, deepest: int) -> list[float]:
        """Levels reached, of 1 to `deepest` that could be."""
        return list(accumulate(accumulate(self.chances(deepest), mul)))

    def _expected(self, deepest: int) -> list[float]:
        """By the usual rates, which change less often than they are asked for."""
        if self.usual is None:
            return []
        if len(self.usual.latest) != deepest:
            self.usual.latest = self.usual.chances(deepest)
        return self.usual.latest


class AcceptanceTracker:
    """How many levels a text's drafts get, of those that were asked for, and how many of them are accepted."""

    def __init__(
        self, usual: AcceptanceTracker | None = None, *, temperature: float = 0.0, first: float = _PRIOR
    ) -> None:
        """`first` is expected before anything was measured, where nothing is usual."""
        self.temperature = temperature
        self.sure: float | None = None
        """How sure the target is of the next token, where that was looked at: the probability of the likeliest."""
        self.accepted, self.drafted = LevelRates(first), LevelRates(1.0)
        self.rounds = 0
        self.usual: AcceptanceTracker | None = None
        self._expected: tuple[list[float], list[float]] | None = None
        if usual is not None:
            self.like(usual)

    def like(self, usual: AcceptanceTracker) -> None:
        """Expect these rates where this text's own are not known."""
        self.usual, self._expected = usual, None
        self.accepted.usual, self.drafted.usual = usual.accepted, usual.drafted

    def add(self, accepted: int, levels: int, drafted: int | None = None) -> None:
        """Count a round of which `levels` were asked for: a draft may end where the drafter is unsure. A text's first
        ones count as usual, too."""
        self.rounds += 1
        self._expected = None
        self.accepted.add(accepted, levels)
        self.drafted.add(levels if drafted is None else drafted, levels)
        if self.usual is not None and self.rounds <= FIRST_DRAFTS:
            self.usual.add(accepted, levels, drafted)

    def expected(self, deepest: int) -> tuple[list[float], list[float]]:
        """Accepted tokens, and levels drafted, of drafts of 1 to `deepest` levels. Without drafts yet, a text has the
        usual ones; else they are computed when a round is added, which is often enough."""
        if self.usual is not None and not self.accepted.tried:
            return self.usual.expected(deepest)
        if self._expected is None or len(self._expected[0]) != deepest:
            self._expected = self.accepted.reached(deepest), self.drafted.reached(deepest)
        return self._expected


class UsualAcceptance:
    """What was usual for texts of each kind, which new ones are expected to do."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[float, int], AcceptanceTracker] = {}
        """By temperature and how sure the target was; the latter is -1 where nobody has looked."""

    def text(self, temperature: float) -> AcceptanceTracker:
        """A new text. The temperature decides how well drafts do; like ones are one, for clients choose them."""
        temperature = round(min(temperature, _HOTTEST), 1)
        return AcceptanceTracker(self._of_kind(temperature, -1, _PRIOR), temperature=temperature)

    def saw(self, text: AcceptanceTracker, sure: float) -> None:
        """The target was so sure of the text's next token; the text is expected to do as others of its kind."""
        text.sure = sure if text.sure is None else _KEEP_SURE * text.sure + (1 - _KEEP_SURE) * sure
        text.like(self._of_kind(text.temperature, bisect_right(_KINDS, text.sure), max(_PRIOR, text.sure)))

    def _of_kind(self, temperature: float, sureness: int, first: float) -> AcceptanceTracker:
        kind = temperature, sureness
        if kind not in self._kinds:
            self._kinds[kind] = AcceptanceTracker(first=first)
        return self._kinds[kind]
