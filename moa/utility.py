"""How deep to draft, or not at all, by expected gain and cost. Pure: the caller passes times.

A round is one forward of the target over the pending tokens of some texts and their drafts. A level costs drafter and
target time whether it is accepted or not, and the more texts share the forward, the more a draft takes from the others:
so plain decoding is faster where drafts are rejected, or where the batch is full. Acceptance is measured for each text,
times over all (`moa.batch_costs`). A drafter that was not used for a while must first read the missed text, which costs
time too. Where drafting lost, it is tried again when plain decoding has taken so long that the trial, reading included,
is a small share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moa.batch_costs import BatchCosts, BatchRun, Floats
from moa.plain_spell import PlainSpell
from moa.tree import TreeShape

_KEEP, _KEEP_USUAL = 0.9, 0.98
"""Weight that older rounds keep in the acceptance rate when a new round is added: of one text, and of all."""
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32
"""Plain rounds before the first draft, and rounds with drafts after which a plain one measures the baseline again."""
_DEEPER_EVERY = 8
"""After this many rounds with drafts, one is a level deeper than the estimated optimum."""
_PRIOR, _WEIGHT = 0.7, 3.0
"""Prior chance that a level is accepted; and the weight in rounds of what is expected before a text was measured: that
prior, the level before, or the usual rates. With the weight of one round a single miss ended all drafting."""
_SHARE = 0.005
"""Share of the time of plain decoding that trials may take."""
_HORIZON = 16
"""Rounds within which drafting has to save what the drafter's reading costs."""
_STALL = 0.25
"""How much longer than a plain round one may take for the drafter's reading: the other texts wait for it."""
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
    _gains: Floats | None = None

    def add(self, accepted: int, levels: int) -> None:
        """Count a round that drafted `levels`, of which `accepted` were accepted."""
        self._gains = None
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
            prior, at = self.usual.chance(level), level
        else:
            at = min(level, len(self.tried) - 1)
            prior = self.chance(at - 1) if at > 0 else _PRIOR
        tried, won = (self.tried[at], self.won[at]) if 0 <= at < len(self.tried) else (0.0, 0.0)
        return (won + _WEIGHT * prior) / (tried + _WEIGHT)

    def gains(self, deepest: int) -> Floats:
        """Accepted tokens expected of drafts of 1 to `deepest` levels. Without drafts yet, a text has the usual ones;
        else they are computed when a round is added, which is often enough."""
        if self.usual is not None and not self.tried:
            return self.usual.gains(deepest)
        if self._gains is None or len(self._gains) != deepest:
            self._gains = np.cumsum(np.cumprod([self.chance(level) for level in range(deepest)]))
        return self._gains


class Utility:
    """How many levels each text of the next round should draft."""

    def __init__(self, shape: TreeShape) -> None:
        self.costs = BatchCosts()
        self._deepest = shape.depth
        breadth, levels = shape.breadth, np.arange(1, shape.depth + 1, dtype=np.float64)
        # What a draft of so many levels really has, for it also ends where the drafter is unsure.
        self._nodes = np.minimum(shape.nodes, breadth + breadth * breadth * (levels - 1))
        self._steps = levels
        self._usual: dict[float, AcceptanceTracker] = {}
        self._drafted = 0
        """Rounds with drafts since the latest plain one."""
        self._batch: tuple[int, int] | None = None
        """Texts of the latest round that was planned, and other tokens beside them."""
        self.plain_spell = PlainSpell()

    def text(self, temperature: float) -> AcceptanceTracker:
        """A new text: it starts with the rates of all at its temperature, which decides how well drafts do."""
        self.plain_spell.text_began()
        return AcceptanceTracker(self._usual.setdefault(temperature, AcceptanceTracker()))

    def levels(self, texts: Sequence[AcceptanceTracker], missed: Sequence[int | None], beside: int = 0) -> list[int]:
        """Levels to draft for each; 0: plain decoding. `missed` tokens of a text, the latest round's left out, were not
        yet read by the drafter (None: it cannot draft for this one); `beside` other tokens are in the forward."""
        costs, found = self.costs, np.zeros(len(texts), dtype=np.int64)
        able = [place for place, tokens in enumerate(missed) if tokens is not None]
        if not able or costs.rounds < _FIRST_PLAIN:
            return found.tolist()
        plain = costs.plain(len(texts), len(texts) + beside)
        self._batch = len(texts), beside
        if not plain or self._drafted >= _PLAIN_EVERY:
            return found.tolist()
        if len(texts) == 1:
            return [self._alone(texts[0], costs.price * (missed[0] or 0), beside, plain)]
        reading = np.array([costs.price * (missed[place] or 0) for place in able])
        unread = np.array([bool(missed[place]) for place in able])
        gains = np.stack([texts[place].gains(self._deepest) for place in able])
        places, best, levels = np.array(able), np.zeros(0, dtype=np.int64), 0
        if costs.credit >= 0:
            best, levels = self._best(len(texts), beside, plain, gains, reading)
        if len(best):
            # Others wait for what nobody knows the cost of.
            levels = self._now_deeper(levels) if costs.step else 1
            # The price of reading is not known before the first: it reads alone.
            late = unread[best] & (not costs.reading or np.cumsum(reading[best]) > _STALL * plain)
            late[np.flatnonzero(late)[:1]] = late.sum() < unread[best].sum()  # one at least goes on
            found[places[best[~late]]] = levels
        elif self._trial_is_due(len(texts), beside, plain, reading.min()):
            found[places[reading.argmin()]] = 1
        else:
            self.plain_spell.begin(len(texts), costs.rounds)
        return found.tolist()

    def _alone(self, text: AcceptanceTracker, reading: float, beside: int, plain: float) -> int:
        """The same of a single text, which is what a small target beside its user runs: there a decision by arrays of
        a few numbers would take a tenth of the round."""
        costs, best, most = self.costs, 0, _MARGIN / plain
        if costs.credit >= 0:
            fixed = costs.rest.of(1) + costs.ready.of(1) + reading / _HORIZON
            step, gains = costs.step.of(1), text.gains(self._deepest).tolist()
            shapes = zip(gains, self._nodes.tolist(), self._steps.tolist(), strict=True)
            for level, (gain, nodes, steps) in enumerate(shapes, start=1):
                seconds = fixed + costs.forward.of(1 + beside + nodes) + steps * step
                if (rate := (1.0 + gain) / max(plain, seconds)) > most:
                    best, most = level, rate
        if best:
            return self._now_deeper(best)
        if self._trial_is_due(1, beside, plain, reading):
            return 1
        self.plain_spell.begin(1, costs.rounds)
        return 0

    def _now_deeper(self, levels: int) -> int:
        """Deeper levels must be tried now and then, or their estimates are never updated."""
        return min(levels + (self._drafted % _DEEPER_EVERY == _DEEPER_EVERY - 1), self._deepest)

    def _trial_is_due(self, texts: int, beside: int, plain: float, reading: float) -> bool:
        """Whether plain decoding has taken so long that a draft of one level in spite of it is a small share."""
        return self.costs.since * _SHARE >= reading + self._first_level(texts, beside) - plain

    def _best(
        self, texts: int, beside: int, plain: float, gains: Floats, reading: Floats
    ) -> tuple[NDArray[np.int64], int]:
        """Which texts should draft, the likeliest first, and how many levels: the most tokens a second."""
        spread = reading / _HORIZON
        order = np.argsort((texts / plain) * spread[:, None] - gains, axis=0, kind="stable")
        won = texts + np.cumsum(np.take_along_axis(gains, order, 0), 0)
        drafting = np.arange(1, len(gains) + 1)[:, None]
        seconds = self._seconds(texts, beside, drafting) + np.cumsum(spread[order], 0)
        rate = won / np.maximum(plain, seconds)
        count, level = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[count, level] <= _MARGIN * texts / plain:
            return np.zeros(0, dtype=np.int64), 0
        return order[: count + 1, level], int(level) + 1

    def _seconds(self, texts: int, beside: int, drafting: NDArray[np.int64] | Floats) -> Floats:
        """Seconds `[n, levels]` of a round in which `drafting` `[n, 1]` of the texts draft, by number of levels."""
        costs = self.costs
        forward = costs.forward.at(texts + beside + drafting * self._nodes) + costs.rest.at(texts)
        return forward + costs.ready.at(drafting) + self._steps * costs.step.at(drafting)

    def _first_level(self, texts: int, beside: int) -> float:
        """Seconds of a round in which one text drafts one level."""
        costs = self.costs
        forward = costs.forward.of(texts + beside + float(self._nodes[0])) + costs.rest.of(texts)
        return forward + costs.ready.of(1) + float(self._steps[0]) * costs.step.of(1)

    def matching(self, text: AcceptanceTracker) -> float:
        """Accepted tokens that a draft must promise which costs nothing to make, to be worth as much as one of ours."""
        if self._batch is None or not self.costs.step:
            return _UNKNOWN_MATCH
        texts, beside = self._batch
        plain = self.costs.plain(texts, texts + beside)
        if not plain:
            return _UNKNOWN_MATCH
        worth = plain / np.maximum(plain, self._seconds(texts, beside, np.full((1, 1), texts))[0])
        return max(0.0, float(((1.0 + text.gains(self._deepest)) * worth).max()) - 1.0)

    def record(self, texts: Sequence[tuple[AcceptanceTracker, int, int, int]], ran: BatchRun) -> None:
        """Learn from a round: the levels that were asked for of each text that drafted, its nodes, and how many tokens
        of them were accepted."""
        self.costs.add(ran, self.plain_spell.stands_for)
        if not ran.texts:
            return
        self._drafted = self._drafted + 1 if texts else 0
        for text, levels, nodes, accepted in texts:
            at = levels - 1
            self._nodes[at] = _KEEP * self._nodes[at] + (1 - _KEEP) * nodes
            self._steps[at] = _KEEP * self._steps[at] + (1 - _KEEP) * ran.steps
            text.add(accepted, levels)
            if text.usual is not None:
                text.usual.add(accepted, levels)
