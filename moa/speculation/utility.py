"""How deep to draft, or not at all, by expected gain and cost. Pure: the caller passes times.

A round is one forward of the target over the pending tokens of some texts and their drafts. A level costs drafter and
target time whether it is accepted or not, and the more texts share the forward, the more a draft takes from the others:
so plain decoding is faster where drafts are rejected, or where the batch is full. Acceptance is measured for each text,
times over all. A drafter that was not used for a while must first read the missed text, which costs time too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moa.speculation.acceptance import FIRST_DRAFTS, AcceptanceTracker, UsualAcceptance
from moa.speculation.batch_costs import BatchCosts, BatchRun, Floats
from moa.speculation.plain_spell import PlainSpell
from moa.tree import TreeShape

_KEEP_WIDTH = 0.98
"""Weight that the width of older trees keeps when a new one is added."""
_LOOK_FIRST = 0.25
"""A text is looked at in a plain round before the drafter reads it, if reading takes more than this share of such a
round. A slow target makes reading cheap and plain rounds dear."""
_LOOK_AGAIN = 4
"""Of the rounds that are decided on, one of so many looks again at texts that were looked at before."""
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32
"""Plain rounds before the first draft, and rounds with drafts after which a plain one measures the baseline again."""
_DEEPER_EVERY = 8
"""After this many rounds with drafts, one is a level deeper than the estimated optimum."""
_LEARNING, _LEARNT = 12.0, 4
"""Plain rounds that a text's first drafts may cost in any case, while little is known; and their levels."""
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
_MOST_ASKED = 0.9
"""The most that a node or a level must promise: what it costs is estimated, too."""
_HOPELESS = 0.5
"""A level that wins less than this share of what its drafter's time is worth ends the search for the best depth."""
_MARGIN = 1.05
"""Draft only if the estimated tokens a second are at least this many times those of plain decoding."""


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
        self._usual = UsualAcceptance()
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
        """A new text."""
        self.plain_spell.text_began()
        self._begun += 1
        return self._usual.text(temperature)

    def look(self, texts: Sequence[AcceptanceTracker], sureness: Callable[[Sequence[int]], Sequence[float]]) -> None:
        """See how sure the target was of the next token of some of the latest round's `texts`, by their places."""
        if not self._planned:
            return
        self._planned, self._looked = False, self._looked + 1
        places = [place for place, text in enumerate(texts) if text.sure is None]
        if not places and self._looked % _LOOK_AGAIN == 0:
            places = [place for place, text in enumerate(texts) if not text.rounds]
        for place, sure in zip(places[:_FEW], sureness(places[:_FEW]) if places else (), strict=True):
            self._usual.saw(texts[place], sure)

    def levels(self, texts: Sequence[AcceptanceTracker], missed: Sequence[int | None], beside: int = 0) -> list[int]:
        """Levels to draft for each; 0: plain decoding. `missed` tokens of a text, the latest round's left out, were not
        yet read by the drafter (None: it cannot draft for this one); `beside` other tokens are in the forward."""
        costs, found = self.costs, np.zeros(len(texts), dtype=np.int64)
        self._planned = True
        plain = costs.plain(len(texts), len(texts) + beside)
        self._batch, self._rate = (len(texts), beside), len(texts) / plain if plain else 0.0
        if not plain or costs.rounds < _FIRST_PLAIN or self._drafted >= _PLAIN_EVERY or self._settling:
            return found.tolist()
        able = [place for place, text in enumerate(texts) if self._able(text, missed[place], plain)]
        if not able:
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

    def _able(self, text: AcceptanceTracker, missed: int | None, plain: float) -> bool:
        """Whether the drafter may draft for this text, and may read it before anybody has looked at it."""
        if not missed or text.sure is not None:
            return missed is not None
        return bool(self.costs.reading) and self.costs.price * missed <= _LOOK_FIRST * plain

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
        lost = reading + float(self._seconds(texts, beside, 1, levels, levels)) - plain
        if texts <= _FEW and text.rounds < FIRST_DRAFTS and lost <= self._learning * plain:
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
        taken = np.take_along_axis(steps, order, 0)
        drafting, longest = np.arange(1, len(taken) + 1)[:, None], np.maximum.accumulate(taken, 0)
        seconds = self._seconds(texts, beside, drafting, np.cumsum(taken, 0), longest) + np.cumsum(spread[order], 0)
        rate = won / np.maximum(plain, seconds)
        count, level = np.unravel_index(int(rate.argmax()), rate.shape)
        if rate[count, level] <= _MARGIN * texts / plain:
            return np.zeros(0, dtype=np.int64), 0
        self._rate = float(rate[count, level])
        return order[: count + 1, level], int(level) + 1

    def _seconds(self, texts: int, beside: int, drafting: ArrayLike, levels: ArrayLike, longest: ArrayLike) -> Floats:
        """Seconds of rounds in which so many of the texts are `drafting`, so many `levels` in all, the longest of which
        they wait for."""
        costs = self.costs
        forward = costs.forward.at(texts + beside + self._width * np.asarray(levels)) + costs.rest.of(texts)
        return costs.longer * (forward + costs.draft(drafting, longest))

    def matching(self, text: AcceptanceTracker) -> float:
        """Accepted tokens that a draft must promise which costs nothing to make, to be worth as much as one of ours."""
        if self._batch is None or not self.costs.drafted:
            return _UNKNOWN_MATCH
        texts, beside = self._batch
        plain = self.costs.plain(texts, texts + beside)
        if not plain:
            return _UNKNOWN_MATCH
        gains, steps = map(np.array, text.expected(self._deepest))
        seconds = self._seconds(texts, beside, texts, texts * steps, steps)  # if all draft as many levels
        worth = plain / np.maximum(plain, seconds)
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


def _log(share: float) -> float:
    """Of a probability that a draft must have; nothing is asked for what costs nothing, and never certainty."""
    return math.log(min(share, _MOST_ASKED)) if share > 0 else -math.inf
