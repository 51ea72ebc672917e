"""Whether to draft, how deep, and for which texts of a batch: the most expected tokens a second. Pure: no clock.

A round is one forward of the target over the pending tokens of some texts, their drafts, and other tokens beside them.

    policy = Policy(shape)
    text = policy.text(temperature)                  # acceptance of one text, begun from texts of like temperature
    depths = policy.plan([text], unread=[120])       # before a round; 0: decode plainly
    tree = policy.shape(depths[0])                   # how far that draft may grow
    policy.record([Drafted(text, ...)], RoundTime(...))  # after it, plain or not

A draft must promise 1.05 times the speed of plain decoding. Of a text that was not drafted for lately we know nothing:
for its first draft, and again after 16 plain rounds, then 32, 64, ... 512, it is planned for with a hopeful acceptance.
So where costs forbid it, as in a full batch on a processor, nothing is tried; and where a trial fails, few follow.

The device plans by the same two parts: `LevelRates` for the acceptance of its chains and trees, and `Cost` for the
verifier's forward by nodes and for a step of its own drafter by width. Its plan adds what is about the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from moa.speculation.cost import Cost
from moa.tree import TreeShape

_MARGIN = 1.05
"""Draft only for an expected speed of at least this many times plain decoding."""
_PRIOR, _WEIGHT = 0.7, 3.0
"""Prior chance that a level is accepted, and its weight in rounds."""
_KEEP, _KEEP_CLASS = 0.9, 0.97
"""Weight that older rounds keep in the acceptance of a text, and of a temperature class."""
_FIRST_DRAFTS = 3
"""Drafts of a text that count for its class: later ones are of texts that drafts do well for."""
_HOTTEST = 2.0
"""Temperatures above are taken for this one."""
_HOPE = 0.8
"""Chance that a level is accepted, assumed for trials."""
_RETRY, _LONGEST_RETRY = 16, 512
"""Plain rounds of a text before a trial: after the first trial, and at most."""
_REVIEW = 8
"""Plain rounds without another decision, after plain decoding was best for all."""
_COLD, _WARM = 8.0, 8
"""The first drafts of a process, and its first reading, may take 8 times as long as later ones; so
an eighth of their time counts, for 8 rounds with drafts, and for one reading."""
_CLOSE, _CHECK, _LONGEST_CHECK = 1.5, 32, 256
"""One round of 256 measures plain decoding again; of 32 if drafts promise less than 1.5 times its
speed; and more often as long as there were few such rounds."""
_PROBE, _LONGEST_PROBE = 64, 512
"""Plain rounds before one level is drafted against the estimate, to measure its cost again; doubled
each time."""
_FASTER, _OFTEN = 0.8, 8
"""A plain round that took less than this share of the estimate is followed by another; and of n
such rounds, the next comes within 8 n."""
_READ_SHARE = 0.02
"""Reading for that may take this share of their time."""
_HORIZON = 8
"""Rounds within which drafting has to save what the drafter's reading costs."""
_STALL = 0.25
"""Longest reading in one round, of a plain round's time: the other texts wait for it. One text may
take longer."""
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Depths to choose from, beside the deepest."""
_MOST_ASKED = 0.9
"""The most that a node or a level must promise: what it costs is an estimate, too."""


class LevelRates:
    """How often each level of a draft was reached, if the level before was. Older rounds count
    less; so a level that was not tried for a while is expected to do as the prior again, or as the
    level before if that does better."""

    def __init__(self, prior: Sequence[float] | LevelRates, keep: float = _KEEP) -> None:
        """`prior` is by level, or the rates of others, which may change."""
        self._prior = prior
        self._keep = keep
        self.forget()

    def forget(self) -> None:
        """Expect the prior again."""
        deepest = len(self._prior)
        self._tried = [0.0] * deepest
        self._won = [0.0] * deepest
        self._chances: list[float] = []
        self._totals: list[float] = []

    def __len__(self) -> int:
        return len(self._tried)

    def add(self, reached: int, levels: int) -> None:
        """A round that could reach `levels` reached so many."""
        for level in range(len(self)):
            tried = level <= reached and level < levels
            won = level < reached
            self._tried[level] = self._keep * self._tried[level] + tried
            self._won[level] = self._keep * self._won[level] + (tried and won)
        self._chances = []
        self._totals = []

    def chances(self) -> list[float]:
        """That a level is reached, if the one before was."""
        if not self._chances:
            prior = self._prior.chances() if isinstance(self._prior, LevelRates) else self._prior
            before = 0.0
            for tried, won, usual in zip(self._tried, self._won, prior, strict=True):
                before = (won + _WEIGHT * max(before, usual)) / (tried + _WEIGHT)
                self._chances.append(before)
        return self._chances

    def totals(self) -> list[float]:
        """Expected levels reached, of drafts of 1, 2, 3, ... levels."""
        if not self._totals:
            self._totals = list(accumulate(accumulate(self.chances(), mul)))
        return self._totals


class TextAcceptance:
    """One text: how deep its drafts go of what was asked for, how many levels are accepted, and
    when to try again."""

    def __init__(self, usual: TextAcceptance | None, deepest: int) -> None:
        self._usual = usual
        keep = _KEEP_CLASS if usual is None else _KEEP
        self.accepted: LevelRates = LevelRates(
            [_PRIOR] * deepest if usual is None else usual.accepted, keep
        )
        self.drafted: LevelRates = LevelRates(
            [1.0] * deepest if usual is None else usual.drafted, keep
        )
        self.drafts = 0
        self.trial = False
        """Whether the draft of the planned round is one."""
        self.due, self._wait = 0, _RETRY // 2
        """The round from which on a trial is due."""

    def add(self, now: int, asked: int, drafted: int, accepted: int) -> None:
        """Count a draft of round `now`. One that ends early, where the drafter is unsure, has
        missed what was asked."""
        self.drafts += 1
        self.accepted.add(accepted, asked)
        self.drafted.add(drafted, asked)
        if self._usual is not None and self.drafts <= _FIRST_DRAFTS:
            self._usual.add(now, asked, drafted, accepted)
        if self.trial:
            self._wait = min(2 * self._wait, _LONGEST_RETRY)
        elif accepted:
            self._wait = max(self._wait // 2, _RETRY)
        self.due = now + self._wait
        self.trial = False


class Drafted(NamedTuple):
    """A text's draft in a round."""

    text: TextAcceptance
    asked: int
    """Levels asked for."""
    levels: int
    """Those that it had."""
    nodes: int
    accepted: int


class RoundTime(NamedTuple):
    """What a round took. Other work may be among its `tokens`."""

    tokens: int
    """Of the target's forward."""
    forward_seconds: float
    """With all that is done in every round, drafted or not."""
    draft_seconds: float = 0.0
    """Without what the drafter had to read of earlier rounds."""


class _Best(NamedTuple):
    """Depth and texts with the most expected tokens a second."""

    rate: float
    depth: int = 0
    places: Sequence[int] = ()


class Policy:
    """How many levels each text of the next round should draft."""

    def __init__(self, shape: TreeShape) -> None:
        self.forward = Cost()
        """By its tokens, and all else of a round without drafts."""
        self.first, self.further = Cost(), Cost()
        """A draft's first level with all that goes before it, and each further one, by the texts
        that draft."""
        self._reading, self._readings = 0.0, 0
        """Seconds of a token that the drafter has missed; and how often they were measured."""
        self._shape = shape
        self._depths = sorted({depth for depth in _DEPTHS if depth < shape.depth} | {shape.depth})
        self._hope = list(accumulate(_HOPE**level for level in range(1, shape.depth + 1)))
        self._all = list(map(float, range(1, shape.depth + 1)))
        self._width = 1.0 if shape.breadth == 1 else 2.0
        """Nodes of a level, on average."""
        self._classes: dict[float, TextAcceptance] = {}
        self._now = 0
        """Rounds so far."""
        self._review = 0
        """The round of the next decision."""
        self._checked, self._checks = 0, 0
        """The latest plain round that was no faster than estimated; and how many there were."""
        self._drafted, self._probe, self._drafts = 0, _PROBE, 0
        """The latest round with a draft; plain rounds after it until a probe; and how many there
        were."""
        self._planned = 1, 0, 0.0
        """Texts of the latest round that was decided on, tokens beside them, and expected tokens a
        second."""

    def text(self, temperature: float) -> TextAcceptance:
        """A new text. How well drafts do depends on the temperature; like ones are one, for clients
        choose them."""
        kind = round(min(temperature, _HOTTEST), 1)
        if kind not in self._classes:
            self._classes[kind] = TextAcceptance(None, self._shape.depth)
        self._review = 0
        return TextAcceptance(self._classes[kind], self._shape.depth)

    def plan(
        self, texts: Sequence[TextAcceptance], unread: Iterable[int | None], beside: int = 0
    ) -> list[int]:
        """Levels to draft for each text. `unread` tokens of it, the latest round's left out, the
        drafter must read first (None: it cannot draft for this one); `beside` other tokens are in
        the forward."""
        depths = [0] * len(texts)
        self._now += bool(texts)
        plain = self.forward.seconds(len(texts) + beside)
        if not texts or self._now < self._review or not plain:
            return depths
        missed = {place: tokens for place, tokens in enumerate(unread) if tokens is not None}
        each = self._reading / (_COLD if self._readings < 2 else 1.0)
        reading = {place: each * tokens for place, tokens in missed.items()}
        best = self._best(texts, reading, beside, plain)
        rarely = _CHECK if best.rate < _CLOSE * len(texts) / plain else _LONGEST_CHECK
        if self._now - self._checked > min(rarely, _OFTEN * self._checks):
            best = _Best(len(texts) / plain)
        elif not best.depth:
            self._review = self._now + _REVIEW
            rounds = self._now - self._drafted
            if (
                rounds > self._probe
                and min(reading.values(), default=math.inf) < _READ_SHARE * rounds * plain
            ):
                self._probe = min(2 * self._probe, _LONGEST_PROBE)
                best = _Best(best.rate, 1, [min(reading, key=reading.__getitem__)])
        else:
            self._probe = _PROBE
        self._planned = len(texts), beside, best.rate
        stalled = 0.0
        readers = 0
        for place in best.places:
            if missed[place]:
                stalled = stalled + reading[place]
                readers = readers + 1
                if readers > 1 and (stalled > _STALL * plain or not self._readings):
                    continue
            depths[place] = best.depth
            texts[place].trial = self._now >= texts[place].due
            if texts[place].trial:
                texts[place].accepted.forget()
        return depths

    def _best(
        self, texts: Sequence[TextAcceptance], reading: dict[int, float], beside: int, plain: float
    ) -> _Best:
        best = _Best(_MARGIN * len(texts) / plain)
        many = len(texts)
        worth = many / plain / _HORIZON
        """Tokens that a second of reading costs in each of the next rounds."""
        gains = {
            at: self._hope if self._now >= texts[at].due else texts[at].accepted.totals()
            for at in reading
        }
        levels = {
            at: self._all if self._now >= texts[at].due else texts[at].drafted.totals()
            for at in reading
        }
        for depth in self._depths:
            order = sorted(reading, key=lambda at: worth * reading[at] - gains[at][depth - 1])
            won = float(many)
            run = 0.0
            longest = 0.0
            read = 0.0
            for count, at in enumerate(order, 1):
                won += gains[at][depth - 1]
                run += levels[at][depth - 1]
                longest = max(longest, levels[at][depth - 1])
                read += reading[at]
                if count & (count - 1) and count < len(order):
                    continue  # one, two, four, ... or all: close enough, and quick
                seconds = self._drafting(count, longest) + read / _HORIZON
                seconds += self.forward.seconds(many + beside + self._width * run)
                if won > best.rate * seconds:
                    best = _Best(won / seconds, depth, order[:count])
        return best

    def _drafting(self, texts: int, levels: float) -> float:
        """Seconds of drafts of so many levels for so many texts at once."""
        cold = _COLD if self._drafts < _WARM else 1.0
        return (self.first.seconds(texts) + (levels - 1) * self.further.seconds(texts)) / cold

    def shape(self, levels: int) -> TreeShape:
        """A tree of so many levels in which each node promises what its time in the forward is
        worth, and each level what the drafter's time is worth, at the expected tokens a second."""
        texts, beside, rate = self._planned
        plain = texts + beside
        node = self.forward.added(8, beside=plain) / 8
        level = self.further.seconds(texts)
        return replace(
            self._shape,
            depth=levels,
            min_score=max(self._shape.min_score, _log(rate * level / texts)),
            least=max(self._shape.least, _log(rate * node)),
        )

    def matching(self, text: TextAcceptance) -> float:
        """Accepted tokens that a draft which costs nothing to make must promise, to be worth as
        much as ours."""
        texts, beside, _ = self._planned
        plain = self.forward.seconds(texts + beside)
        best = 1.0
        for depth in self._depths if plain else ():
            levels = text.drafted.totals()[depth - 1]
            seconds = self._drafting(texts, levels) + self.forward.seconds(
                beside + texts * (1 + self._width * levels)
            )
            best = max(best, (1 + text.accepted.totals()[depth - 1]) * plain / max(plain, seconds))
        return best - 1.0

    def read(self, tokens: int, seconds: float) -> None:
        """The drafter has read so many tokens of earlier rounds."""
        self._readings += 1
        each = seconds / tokens
        first = self._readings == 1 or (self._readings == 2 and each < self._reading)
        self._reading += (1.0 if first else 0.3) * (each - self._reading)

    def record(self, drafts: Sequence[Drafted], ran: RoundTime) -> None:
        """Learn from a round."""
        expected = self.forward.seconds(ran.tokens)
        self.forward.observe(ran.tokens, ran.forward_seconds)
        if not drafts:
            self._checks += 1
            if ran.forward_seconds > _FASTER * expected:
                self._checked = self._now
            return
        self._drafted = self._now
        self._drafts += 1
        self._learn_levels(
            len(drafts), max(1, *(draft.levels for draft in drafts)), ran.draft_seconds
        )
        for draft in drafts:
            if draft.levels:
                self._width += 0.02 * (draft.nodes / draft.levels - self._width)
            draft.text.add(self._now, draft.asked, draft.levels, draft.accepted)

    def _learn_levels(self, texts: int, levels: int, seconds: float) -> None:
        """A draft that took longer or less than expected took so in the same proportion in all its
        levels."""
        first = self.first.seconds(texts)
        mean = seconds / levels
        further = self.further.seconds(texts) or first
        known = first + (levels - 1) * further
        self.first.observe(texts, seconds * first / known if first else mean)
        if levels > 1:
            self.further.observe(texts, seconds * further / known if further else mean)
        elif mean < further:
            self.further.observe(texts, mean)


def least_chance(forward: Cost, rows: int) -> float:
    """The chance of being accepted from which on one more token of a draft pays, in a forward of so
    many sessions: it saves its session a forward, and makes this one longer for all. Likelier ones
    than not may always go along."""
    return min(0.5, forward.added(8, beside=rows) / 8 * rows / forward.seconds(rows))


def _log(share: float) -> float:
    """Of a probability that a draft must have: nothing is asked for what costs nothing, and never
    certainty."""
    return math.log(min(share, _MOST_ASKED)) if share > 0 else -math.inf
