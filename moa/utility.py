"""How deep to draft, or not at all, by expected gain and cost. Pure: the caller passes times.

A round is one forward of the target over the pending tokens of some texts and their drafts. A level costs drafter and
target time whether it is accepted or not, and the more texts share the forward, the more a draft takes from the others:
so plain decoding is faster where drafts are rejected, or where the batch is full. Acceptance is measured for each text,
times over all (`moa.batch_costs`). A drafter that was not used for a while must first read the missed text, which costs
time too. Where drafting lost, it is tried again when plain decoding has taken so long that the trial, reading included,
is a small share of it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa.batch_costs import BatchCosts, BatchRun, Floats
from moa.plain_spell import PlainSpell
from moa.tree import TreeShape

_KEEP, _KEEP_USUAL, _KEEP_WIDTH, _KEEP_SURE = 0.9, 0.97, 0.98, 0.7
"""Weight that older rounds keep when a new one is added: in a text's acceptance rate; in the usual one, to which only
the first drafts of a text are added, for that is what a new text must be judged by; in the width of trees; and in how
sure the target is."""
_LOOK_AGAIN = 4
"""Of the rounds that are decided on, one of so many looks again at texts that were looked at before."""
_KINDS = (0.5, 0.8, 0.95)
"""Texts of which the target is less sure than these are of another kind."""
_HOTTEST = 2.0
"""Temperatures above are taken for this one."""
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32
"""Plain rounds before the first draft, and rounds with drafts after which a plain one measures the baseline again."""
_DEEPER_EVERY = 8
"""After this many rounds with drafts, one is a level deeper than the estimated optimum."""
_PRIOR, _WEIGHT = 0.7, 3.0
"""Prior chance that a level is accepted; and the weight in rounds of what is expected before anything was measured:
that prior, or the usual rates. With the weight of one round a single miss ended all drafting; with that of one and a
half, text that a drafter with records of its prompt was right about every second time was left after two."""
_LEARNING, _OF_A_TEXT, _LEARNT = 12.0, 3, 4
"""Plain rounds that drafts may cost in any case, while little is known; how many drafts of one text, for the next text
may be of another kind; and their levels. As many of a text's drafts count as usual."""
_FEW = 8
"""Texts that share a round, at most, where it is worth looking at each of them to learn."""
_SHARE = 0.003
"""Share of the time of plain decoding that trials may take."""
_HORIZON = 8
"""Rounds within which drafting has to save what the drafter's reading costs."""
_STALL = 0.25
"""How much longer than a plain round one may take for the drafter's reading: the other texts wait for it."""
_UNKNOWN_MATCH = 1.0
"""What a draft of others must promise before our own rounds were measured."""
_NODES = 2
"""Nodes of a level, about, before any draft: most do not promise what they cost."""
_UNTRIED = 8
"""Nodes of a tree while no forward was as large; then twice as many as the largest had tokens."""
_SURE = 0.9
"""The most that a node or a level must promise: what it costs is estimated, too."""
_HOPELESS = 0.5
"""A level that wins less than this share of what its drafter's time is worth ends the search for the best depth."""
_MARGIN = 1.05
"""Draft only if the estimated tokens a second are at least this many times those of plain decoding."""


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
        """Count a round of which `levels` were asked for: a draft may end where the drafter is unsure."""
        self.rounds += 1
        self._expected = None
        self.accepted.add(accepted, levels)
        self.drafted.add(levels if drafted is None else drafted, levels)

    def expected(self, deepest: int) -> tuple[list[float], list[float]]:
        """Accepted tokens, and levels drafted, of drafts of 1 to `deepest` levels. Without drafts yet, a text has the
        usual ones; else they are computed when a round is added, which is often enough."""
        if self.usual is not None and not self.accepted.tried:
            return self.usual.expected(deepest)
        if self._expected is None or len(self._expected[0]) != deepest:
            self._expected = self.accepted.reached(deepest), self.drafted.reached(deepest)
        return self._expected


class Drafted(NamedTuple):
    """A text's draft in a round."""

    text: AcceptanceTracker
    asked: int
    """Levels asked for."""
    levels: int
    """Those that it had."""
    nodes: int
    accepted: int


class Utility:
    """How many levels each text of the next round should draft."""

    def __init__(self, shape: TreeShape) -> None:
        self.costs = BatchCosts()
        self._deepest = shape.depth
        self._width = float(min(shape.breadth, _NODES))
        """Nodes of a level, on average."""
        self._usual: dict[tuple[float, int], AcceptanceTracker] = {}
        """The first drafts of texts, by temperature and how sure the target was."""
        self._drafted = 0
        """Rounds with drafts since the latest plain one."""
        self._settling = False
        """Whether the next round is plain, too: the first after drafts finds the caches as the drafter left them."""
        self._begun = 0
        """Texts that began since the latest round."""
        self._learning = _LEARNING
        """Plain rounds that are left to learn in."""
        self._looked = 0
        self._planned = False
        """Whether the latest round was decided on, and not looked at since."""
        self._batch: tuple[int, int] | None = None
        """Texts of the latest round that was planned, and other tokens beside them."""
        self._rate = 0.0
        """Tokens a second that were expected of it."""
        self.plain_spell = PlainSpell()

    def text(self, temperature: float) -> AcceptanceTracker:
        """A new text. The temperature decides how well drafts do; like ones are one, for clients choose them."""
        self.plain_spell.text_began()
        self._begun += 1
        temperature = round(min(temperature, _HOTTEST), 1)
        return AcceptanceTracker(self._of_kind(temperature, -1, _PRIOR), temperature=temperature)

    def look(self, texts: Sequence[AcceptanceTracker], sureness: Callable[[Sequence[int]], Sequence[float]]) -> None:
        """See how sure the target was of the next token of some `texts` that did not draft, by their places. That tells
        texts apart before the drafter has read them: where the target is sure, a drafter mostly agrees. So a text is
        expected to do as others of its kind."""
        if not self._planned:
            return
        self._planned, self._looked = False, self._looked + 1
        places = [place for place, text in enumerate(texts) if text.sure is None]
        if not places and self._looked % _LOOK_AGAIN == 0:
            places = [place for place, text in enumerate(texts) if not text.rounds]
        for place, sure in zip(places[:_FEW], sureness(places[:_FEW]) if places else (), strict=True):
            self._saw(texts[place], sure)

    def _saw(self, text: AcceptanceTracker, sure: float) -> None:
        text.sure = sure if text.sure is None else _KEEP_SURE * text.sure + (1 - _KEEP_SURE) * sure
        text.like(self._of_kind(text.temperature, bisect_right(_KINDS, text.sure), max(_PRIOR, text.sure)))

    def _of_kind(self, temperature: float, kind: int, first: float) -> AcceptanceTracker:
        return self._usual.setdefault((temperature, kind), AcceptanceTracker(first=first))

    def levels(self, texts: Sequence[AcceptanceTracker], missed: Sequence[int | None], beside: int = 0) -> list[int]:
        """Levels to draft for each; 0: plain decoding. `missed` tokens of a text, the latest round's left out, were not
        yet read by the drafter (None: it cannot draft for this one); `beside` other tokens are in the forward."""
        costs, found = self.costs, np.zeros(len(texts), dtype=np.int64)
        self._planned = True
        able = [place for place, tokens in enumerate(missed) if tokens is not None]
        if not able or costs.rounds < _FIRST_PLAIN:
            return found.tolist()
        plain = costs.plain(len(texts), len(texts) + beside)
        self._batch, self._rate = (len(texts), beside), len(texts) / plain if plain else 0.0
        if not plain or self._drafted >= _PLAIN_EVERY or self._settling:
            return found.tolist()
        if len(texts) == 1:
            return [self._alone(texts[0], costs.price * (missed[0] or 0), beside, plain)]
        reading = np.array([costs.price * (missed[place] or 0) for place in able])
        unread = np.array([bool(missed[place]) for place in able])
        gains, steps = map(np.array, zip(*(texts[place].expected(self._deepest) for place in able), strict=True))
        places, best, levels = np.array(able), np.zeros(0, dtype=np.int64), 0
        if costs.credit >= 0:
            best, levels = self._best(len(texts), beside, plain, gains, steps, reading)
        if len(best):
            levels = self._now_deeper(levels)
            # The price of reading is not known before the first: it reads alone.
            late = unread[best] & (not costs.reading or np.cumsum(reading[best]) > _STALL * plain)
            late[np.flatnonzero(late)[:1]] = late.sum() < unread[best].sum()  # one at least goes on
            found[places[best[~late]]] = levels
        elif levels := self._trial(texts[able[reading.argmin()]], len(texts), beside, plain, reading.min()):
            found[places[reading.argmin()]] = levels
        else:
            self.plain_spell.begin(len(texts), costs.rounds)
        return found.tolist()

    def _alone(self, text: AcceptanceTracker, reading: float, beside: int, plain: float) -> int:
        """The same of a single text, which is what a small target beside its user runs: there a decision by arrays of
        a few numbers would take a tenth of the round."""
        costs, best, most = self.costs, 0, _MARGIN / plain
        if costs.credit >= 0:
            level_seconds = costs.longer * costs.level(1)
            fixed = costs.longer * (costs.rest.of(1) + costs.first.of(1)) - level_seconds + reading / _HORIZON
            last = 0.0
            for level, (gain, run) in enumerate(zip(*text.expected(self._deepest), strict=True), 1):
                seconds = fixed + level_seconds * run + costs.longer * costs.forward.of(1 + beside + self._width * run)
                if (rate := (1.0 + gain) / max(plain, seconds)) > most:
                    best, most = level, rate
                if gain - last < _HOPELESS * most * level_seconds:
                    break  # deeper ones are even less likely, and cost as much
                last = gain
        if best:
            self._rate = most
            return self._now_deeper(best)
        levels = self._trial(text, 1, beside, plain, reading)
        if not levels:
            self.plain_spell.begin(1, costs.rounds)
        return levels

    def shape(self, shape: TreeShape, levels: int) -> TreeShape:
        """A tree of so many levels, as the round that was planned can pay for: a second is worth the tokens that it is
        expected to win in one. So many a node must promise for its time, and all nodes of a level for the level's."""
        if self._batch is None:
            return replace(shape, depth=levels)
        costs, (texts, beside) = self.costs, self._batch
        plain, nodes = texts + beside, min(shape.nodes, max(_UNTRIED, 2 * costs.forward.largest // texts))
        most = plain + texts * nodes
        node = (costs.forward.of(most) - costs.forward.of(plain)) / (most - plain)
        least, level = _log(self._rate * node), _log(self._rate * costs.level(texts) / texts)
        return replace(
            shape, depth=levels, nodes=nodes, min_score=max(shape.min_score, level), least=max(shape.least, least)
        )

    def _now_deeper(self, levels: int) -> int:
        """Deeper levels must be tried now and then, or their estimates are never updated. But what one level costs
        must be known first."""
        if not self.costs.drafted:
            return 1
        return min(levels + (self._drafted % _DEEPER_EVERY == _DEEPER_EVERY - 1), self._deepest)

    def _trial(self, text: AcceptanceTracker, texts: int, beside: int, plain: float, reading: float) -> int:
        """Levels to draft for this text although that does not seem to pay: in some rounds of it while little was
        measured, then one when plain decoding has taken so long that it is a small share. With few texts it is a few
        levels, or it would show neither what a level costs nor that this text is easier than those before."""
        levels = min(_LEARNT, self._deepest) if texts <= _FEW and self.costs.drafted else 1  # others wait
        lost = reading + self._trial_seconds(texts, beside, levels) - plain
        if texts <= _FEW and text.rounds < _OF_A_TEXT and lost <= self._learning * plain:
            self._learning -= lost / plain
            return levels
        return levels if self.costs.since * _SHARE >= lost else 0

    def _best(
        self, texts: int, beside: int, plain: float, gains: Floats, steps: Floats, reading: Floats
    ) -> tuple[NDArray[np.int64], int]:
        """Which texts should draft, the likeliest first, and how many levels: the most tokens a second."""
        spread = reading / _HORIZON
        order = np.argsort((texts / plain) * spread[:, None] - gains, axis=0, kind="stable")
        won = texts + np.cumsum(np.take_along_axis(gains, order, 0), 0)
        seconds = self._seconds(texts, beside, np.take_along_axis(steps, order, 0)) + np.cumsum(spread[order], 0)
        rate = won / np.maximum(plain, seconds)
        count, level = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[count, level] <= _MARGIN * texts / plain:
            return np.zeros(0, dtype=np.int64), 0
        self._rate = float(rate[count, level])
        return order[: count + 1, level], int(level) + 1

    def _seconds(self, texts: int, beside: int, steps: Floats) -> Floats:
        """Seconds `[n, levels]` of a round in which the first 1 to n texts draft so many `steps` `[n, levels]`."""
        costs, drafting = self.costs, np.arange(1, len(steps) + 1)[:, None]
        forward = costs.forward.at(texts + beside + self._width * np.cumsum(steps, 0)) + costs.rest.at(texts)
        return costs.longer * (forward + costs.draft(drafting, np.maximum.accumulate(steps, 0)))

    def _trial_seconds(self, texts: int, beside: int, levels: int) -> float:
        """Seconds of a round in which one text drafts so many levels."""
        costs = self.costs
        forward = costs.forward.of(texts + beside + self._width * levels) + costs.rest.of(texts)
        return costs.longer * (forward + float(costs.draft(1, levels)))

    def matching(self, text: AcceptanceTracker) -> float:
        """Accepted tokens that a draft must promise which costs nothing to make, to be worth as much as one of ours."""
        if self._batch is None or not self.costs.drafted:
            return _UNKNOWN_MATCH
        texts, beside = self._batch
        plain = self.costs.plain(texts, texts + beside)
        if not plain:
            return _UNKNOWN_MATCH
        gains, steps = map(np.array, text.expected(self._deepest))
        forward = self.costs.forward.at(texts * (1.0 + self._width * steps) + beside)
        seconds = forward + self.costs.rest.of(texts) + self.costs.draft(texts, steps)  # if all draft as many levels
        worth = plain / np.maximum(plain, self.costs.longer * seconds)
        return max(0.0, float(((1.0 + gains) * worth).max()) - 1.0)

    def record(self, drafts: Sequence[Drafted], ran: BatchRun) -> None:
        """Learn from a round."""
        # The first plain round after drafts, or after a prompt, finds the caches as these left them.
        usual = not ran.texts or bool(drafts) or (not self._drafted and 2 * self._begun <= ran.texts)
        self.costs.add(ran, self.plain_spell.stands_for, usual=usual)
        if not ran.texts:
            return
        self._begun = 0
        self._settling = not drafts and self._drafted >= _PLAIN_EVERY
        self._drafted = self._drafted + 1 if drafts else 0
        for draft in drafts:
            if draft.levels:
                self._width = _KEEP_WIDTH * self._width + (1 - _KEEP_WIDTH) * draft.nodes / draft.levels
            draft.text.add(draft.accepted, draft.asked, draft.levels)
            if draft.text.usual is not None and draft.text.rounds <= _OF_A_TEXT:
                draft.text.usual.add(draft.accepted, draft.asked, draft.levels)


def _log(share: float) -> float:
    """Of a probability that a draft must have; nothing is asked for what costs nothing, and never certainty."""
    return math.log(min(share, _SURE)) if share > 0 else -math.inf
