"""How far to draft, and whether at all, by what it wins and what it costs. Pure: it is told times, and has no clock.

A round is one forward of the target over the pending token and a draft of so many levels. A level costs drafter and
target time whether it is accepted or not, so where drafts miss, plain decoding is the faster way. What decides is
measured while decoding: acceptance for each text, times for all of them together. Where drafting lost, it is tried
again now and then, ever more rarely.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEEP = 0.9
"""Share of what was measured that a new round leaves standing."""
_OUTLIER = 3.0
"""A round that took so many times what is usual counts as no more than that: the machine did something else."""
_PRIOR, _PRIOR_ROUNDS = 0.7, 4.0
"""Chance that a level is accepted before anything was measured, and for how many rounds that counts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 512
"""Plain rounds before drafting is tried again: at first, and at last."""
_TRIAL = 1
"""Levels of a draft that only tries."""
_MARGIN = 1.02
"""Drafting has to promise so many times the tokens a second of plain decoding."""


@dataclass
class Smoothed:
    """A mean that forgets."""

    value: float = 0.0
    known: bool = False

    def add(self, value: float) -> None:
        """One more measurement."""
        if not self.known:
            self.value, self.known = value, True
        else:
            self.value += (1 - _KEEP) * (min(value, _OUTLIER * self.value) - self.value)


@dataclass
class Acceptance:
    """How often each level was accepted, given the level before; old rounds fade."""

    tried: list[float] = field(default_factory=list)
    won: list[float] = field(default_factory=list)

    @classmethod
    def after(cls, other: Acceptance) -> Acceptance:
        """A new text's, which expects what others had, until it knows better."""
        scale = [min(1.0, _PRIOR_ROUNDS / tried) if tried else 0.0 for tried in other.tried]
        return cls(
            [tried * s for tried, s in zip(other.tried, scale, strict=True)],
            [won * s for won, s in zip(other.won, scale, strict=True)],
        )

    def add(self, accepted: int, levels: int) -> None:
        """A round that drafted `levels`, of which `accepted` were the target's."""
        while len(self.tried) < levels:
            self.tried.append(0.0)
            self.won.append(0.0)
        for level in range(min(accepted + 1, levels)):
            self.tried[level] = _KEEP * self.tried[level] + 1
            self.won[level] = _KEEP * self.won[level] + (level < accepted)

    def chance(self, level: int) -> float:
        """That this level is accepted, if the one before was: the last one measured speaks for those beyond."""
        if not self.tried:
            return _PRIOR
        at = min(level, len(self.tried) - 1)
        prior = self.chance(at - 1) if at else _PRIOR
        weight = 1.0 if at else _PRIOR_ROUNDS
        return (self.won[at] + weight * prior) / (self.tried[at] + weight)


@dataclass
class Costs:
    """What a round takes in seconds: without a draft, and each level more."""

    plain: Smoothed = field(default_factory=Smoothed)
    level: Smoothed = field(default_factory=Smoothed)
    usual: Acceptance = field(default_factory=Acceptance)
    """Of all texts so far: what a new one starts from."""

    def add(self, seconds: float, levels: float) -> None:
        """A round, with so many levels drafted (the mean, where several texts share it)."""
        if levels == 0:
            self.plain.add(seconds)
        elif self.plain.known:
            self.level.add(max(0.0, seconds - self.plain.value) / levels)


class Utility:
    """Of one text: how many levels the next round should draft."""

    def __init__(self, costs: Costs, deepest: int) -> None:
        self.costs, self.deepest = costs, deepest
        self.acceptance = Acceptance.after(costs.usual)
        self._pause, self._since = _FIRST_PAUSE, 0

    def levels(self) -> int:
        """0: none; the target decodes plainly."""
        if not self.costs.plain.known:
            return 0
        if not self.costs.level.known:
            return self.deepest
        best, most = 0, _MARGIN / self.costs.plain.value
        tokens, reach = 1.0, 1.0
        for levels in range(1, self.deepest + 1):
            reach *= self.acceptance.chance(levels - 1)
            tokens += reach
            rate = tokens / (self.costs.plain.value + levels * self.costs.level.value)
            if rate > most:
                best, most = levels, rate
        if best or self._since < self._pause:
            return best
        return min(_TRIAL, self.deepest)

    def told(self, levels: int, accepted: int) -> None:
        """What became of a round."""
        if not levels:
            self._since += 1
            return
        self.acceptance.add(accepted, levels)
        self.costs.usual.add(accepted, levels)
        if self._since >= self._pause:  # that was a trial
            self._pause = _FIRST_PAUSE if self.levels() else min(2 * self._pause, _LONGEST_PAUSE)
        self._since = 0
