"""How far to draft, and whether at all, by what it wins and what it costs. Pure: it is told times, and has no clock.

A round is one forward of the target over the pending token and a draft of so many levels. A level costs drafter and
target time whether it is accepted or not, so where drafts miss, plain decoding is the faster way. What decides is
measured while decoding: acceptance for each text, times for all of them together. Where drafting lost, it is tried
again now and then, ever more rarely.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_KEEP = 0.9
"""Share of what was measured of acceptance that a new round leaves standing."""
_LATEST = 9
"""Rounds of a depth whose times count."""
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32
"""Plain rounds before the first draft; and after so many drafts one more, to know what drafting has to beat."""
_DEEPER_EVERY = 8
"""... and after so many drafts one goes a level deeper than seems best."""
_PRIOR, _PRIOR_ROUNDS = 0.7, 4.0
"""Chance that a level is accepted before anything was measured, and for how many rounds that counts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 512
"""Plain rounds before drafting is tried again: at first, and at last."""
_TRIAL = 1
"""Levels of a draft that only tries."""
_MARGIN = 1.02
"""Drafting has to promise so many times the tokens a second of plain decoding."""


@dataclass
class AcceptanceTracker:
    """How often each level was accepted, given the level before; old rounds fade."""

    tried: list[float] = field(default_factory=list)
    won: list[float] = field(default_factory=list)

    @classmethod
    def after(cls, other: AcceptanceTracker) -> AcceptanceTracker:
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
    """What a round takes in seconds, by the levels drafted: medians of the latest, for a machine that does other things
    too is slow now and then, and never fast."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    drafted: dict[int, deque[float]] = field(default_factory=dict)
    usual: AcceptanceTracker = field(default_factory=AcceptanceTracker)
    """Of all texts so far: what a new one starts from."""
    pause: int = _FIRST_PAUSE
    """Plain rounds, of whatever text, before drafting is tried again; and how many there have been."""
    since: int = 0

    def add(self, seconds: float, levels: float) -> None:
        """A round, with so many levels drafted (the mean, where several texts share it)."""
        if levels == 0:
            self.plain.append(seconds)
        else:
            self.drafted.setdefault(max(1, round(levels)), deque(maxlen=_LATEST)).append(seconds)

    @property
    def known(self) -> bool:
        """Whether rounds with and without a draft were measured."""
        return bool(self.plain and self.drafted)

    def seconds(self, levels: int) -> float:
        """Of a round: between the depths that were measured on a straight line, beyond them on the same one."""
        points = [(0, median(self.plain))]
        points += [(depth, max(points[0][1], median(took))) for depth, took in sorted(self.drafted.items())]
        after = next((n for n, (depth, _) in enumerate(points) if depth >= levels), len(points) - 1)
        (low, less), (high, more) = points[max(0, after - 1)], points[max(1, after)]
        return max(points[0][1], less + (more - less) * (levels - low) / (high - low))


class Utility:
    """Of one text: how many levels the next round should draft."""

    def __init__(self, costs: Costs, deepest: int) -> None:
        self.costs, self.deepest = costs, deepest
        self.acceptance = AcceptanceTracker.after(costs.usual)
        self._drafted = 0

    def levels(self) -> int:
        """0: none; the target decodes plainly."""
        if len(self.costs.plain) < _FIRST_PLAIN or self._drafted >= _PLAIN_EVERY:
            return 0
        if not self.costs.known:
            return self.deepest
        best, most = 0, _MARGIN / self.costs.seconds(0)
        tokens, reach = 1.0, 1.0
        for levels in range(1, self.deepest + 1):
            reach *= self.acceptance.chance(levels - 1)
            tokens += reach
            rate = tokens / self.costs.seconds(levels)
            if rate > most:
                best, most = levels, rate
        if best:
            # What was measured long ago is never measured again unless it is tried.
            return min(best + (self._drafted % _DEEPER_EVERY == _DEEPER_EVERY - 1), self.deepest)
        if self.costs.since < self.costs.pause:
            return 0
        return min(_TRIAL, self.deepest)

    def told(self, levels: int, accepted: int) -> None:
        """What became of a round."""
        if not levels:
            self.costs.since, self._drafted = self.costs.since + 1, 0
            return
        self._drafted += 1
        self.acceptance.add(accepted, levels)
        self.costs.usual.add(accepted, levels)
        if self.costs.since >= self.costs.pause:  # that was a trial
            self.costs.pause = _FIRST_PAUSE if self.levels() else min(2 * self.costs.pause, _LONGEST_PAUSE)
        self.costs.since = 0
