"""How deep to draft, or not at all, by expected gain and cost. Pure: the caller passes times.

A round is one forward of the target over the pending token and a draft of so many levels. A level costs drafter and
target time whether it is accepted or not, so plain decoding is faster where drafts are rejected. Both are measured
while decoding: acceptance for each text, times over all texts. A drafter that was not used for a while must first read
the missed text, which costs time too. Where drafting lost, it is tried again when plain decoding has taken so long that
the trial, reading included, is a small share of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_KEEP, _KEEP_USUAL = 0.9, 0.98
"""Weight that older rounds keep in the acceptance rate when a new round is added: of one text, and of all."""
_LATEST = 31
"""The times of this many latest rounds of a depth are used."""
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32
"""Plain rounds before the first draft, and drafts after which one plain round measures the baseline again."""
_DEEPER_EVERY = 8
"""After this many drafts, one is a level deeper than the estimated optimum."""
_PRIOR, _USUAL_ROUNDS = 0.7, 3.0
"""Prior chance that a level is accepted, with the weight of one round; and the weight in rounds, for a new text, of the
usual rates."""
_TRIAL = 1
"""Levels of a trial draft."""
_SHARE = 0.005
"""Share of the time of plain decoding that trials may take."""
_HORIZON = 16
"""Rounds within which drafting has to save what the drafter's reading costs."""
_CREDIT = 12.0
"""Plain rounds that drafting may lose against what was estimated, before it is off until plain decoding has made up for
it: times of a busy machine are noisy, and an estimate that is wrong by luck stays wrong for a while."""
_OUTLIER = 2.0
"""A round counts as at most so many times its usual time: a machine that slept says nothing of drafting."""
_UNKNOWN_MATCH = 1.0
"""What a draft of others must promise before our own rounds were measured."""
_MARGIN = 1.05
"""Draft only if the estimated tokens a second are at least this many times those of plain decoding."""


@dataclass
class AcceptanceTracker:
    """How often each level was accepted, given that the level before was; older rounds count less."""

    usual: AcceptanceTracker | None = None
    """Rates over all texts so far, which a new text starts with."""
    tried: list[float] = field(default_factory=list)
    won: list[float] = field(default_factory=list)

    def add(self, accepted: int, levels: int) -> None:
        """Count a round that drafted `levels`, of which `accepted` were accepted."""
        while len(self.tried) < levels:
            self.tried.append(0.0)
            self.won.append(0.0)
        keep = _KEEP if self.usual is not None else _KEEP_USUAL
        for level in range(min(accepted + 1, levels)):
            self.tried[level] = keep * self.tried[level] + 1
            self.won[level] = keep * self.won[level] + (level < accepted)

    def chance(self, level: int) -> float:
        """That this level is accepted, if the one before was: of a level never measured, what the last one that was
        says."""
        if self.usual is not None:
            prior, weight, at = self.usual.chance(level), _USUAL_ROUNDS, level
        else:
            at = min(level, len(self.tried) - 1)
            prior, weight = self.chance(at - 1) if at > 0 else _PRIOR, 1.0
        tried, won = (self.tried[at], self.won[at]) if 0 <= at < len(self.tried) else (0.0, 0.0)
        return (won + weight * prior) / (tried + weight)


@dataclass
class Costs:
    """Seconds of a round by drafted levels: medians of the latest rounds, because other load makes single rounds
    slow."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    drafted: dict[int, deque[float]] = field(default_factory=dict)
    reading: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """Seconds a token of text that the drafter had missed."""
    usual: AcceptanceTracker = field(default_factory=AcceptanceTracker)
    """Rates over all texts so far, from which a new text starts."""
    since: float = 0.0
    """Seconds of plain decoding, of whatever text, since the latest draft."""
    credit: float = _CREDIT
    """Plain rounds that drafting may still lose."""
    pace: float = 0.0
    """Seconds of a plain round: a slow mean, for what credit is counted in."""

    def add(self, seconds: float, levels: float, won: float) -> None:
        """Add a round with so many drafted levels and tokens won (their means if several texts share the round)."""
        if levels == 0:
            self.plain.append(seconds)
            self.since += seconds
            self.credit = min(_CREDIT, self.credit + _SHARE)
            usual = min(seconds, _OUTLIER * median(self.plain))
            self.pace = _KEEP_USUAL * self.pace + (1 - _KEEP_USUAL) * usual if self.pace else usual
            return
        self.since = 0.0
        took = self.drafted.setdefault(max(1, round(levels)), deque(maxlen=_LATEST))
        took.append(seconds)
        if self.plain:
            self.credit = min(_CREDIT, self.credit + won - min(seconds, _OUTLIER * median(took)) / self.pace)

    def read(self, seconds: float, tokens: int) -> None:
        """The drafter read so many tokens of text, of rounds that it had no part in."""
        self.reading.append(seconds / tokens)

    def price(self, tokens: int) -> float:
        """Seconds of reading so many; nothing before any was measured."""
        return tokens * median(self.reading) if self.reading else 0.0

    @property
    def known(self) -> bool:
        """Whether rounds with and without a draft were measured."""
        return bool(self.plain and self.drafted)

    def seconds(self, levels: int) -> float:
        """Seconds of a round, interpolated linearly between measured depths, extrapolated beyond them."""
        points = [(0, median(self.plain))]
        points += [(depth, max(points[0][1], median(took))) for depth, took in sorted(self.drafted.items())]
        after = next((n for n, (depth, _) in enumerate(points) if depth >= levels), len(points) - 1)
        (low, less), (high, more) = points[max(0, after - 1)], points[max(1, after)]
        return max(points[0][1], less + (more - less) * (levels - low) / (high - low))


class Utility:
    """How many levels the next round of one text should draft."""

    def __init__(self, costs: Costs, deepest: int) -> None:
        self.costs, self.deepest = costs, deepest
        self.acceptance = AcceptanceTracker(costs.usual)
        self._drafted = 0

    def levels(self, missed: int = 0) -> int:
        """Levels to draft; 0: plain decoding. `missed` tokens of the text, the latest round's left out, were not yet
        read by the drafter."""
        costs = self.costs
        if len(costs.plain) < _FIRST_PLAIN or self._drafted >= _PLAIN_EVERY:
            return 0
        if not costs.known:
            return self.deepest
        best, plain, price = 0, costs.seconds(0), costs.price(missed)
        most, saved = _MARGIN / plain, 0.0
        tokens, reach = 1.0, 1.0
        for levels in range(1, self.deepest + 1):
            reach *= self.acceptance.chance(levels - 1)
            tokens += reach
            rate = tokens / costs.seconds(levels)
            if rate > most:
                best, most, saved = levels, rate, tokens * plain - costs.seconds(levels)
        if best and costs.credit >= 0 and saved * _HORIZON >= price:
            # Deeper levels must be tried now and then, or their estimates are never updated.
            return min(best + (self._drafted % _DEEPER_EVERY == _DEEPER_EVERY - 1), self.deepest)
        trial = min(_TRIAL, self.deepest)
        return trial if costs.since * _SHARE >= price + costs.seconds(trial) - plain else 0

    def matching(self) -> float:
        """Accepted tokens that a draft must promise which costs nothing to make, to be worth as much as one of ours."""
        costs = self.costs
        if not costs.known:
            return _UNKNOWN_MATCH
        plain, tokens, reach, most = costs.seconds(0), 1.0, 1.0, 1.0
        for levels in range(1, self.deepest + 1):
            reach *= self.acceptance.chance(levels - 1)
            tokens += reach
            most = max(most, tokens * plain / costs.seconds(levels))
        return most - 1.0

    def record(self, levels: int, accepted: int) -> None:
        """Record the result of a round."""
        if not levels:
            self._drafted = 0
            return
        self._drafted += 1
        self.acceptance.add(accepted, levels)
        self.costs.usual.add(accepted, levels)
