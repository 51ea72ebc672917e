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

All numbers are in `moa.speculation.tuning`.

The device plans by the same two parts: `LevelRates` for the acceptance of its chains and trees, and `Cost` for the
verifier's forward by nodes and for a step of its own drafter by width. Its plan adds what is about the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from moa.speculation.cost import Cost
from moa.speculation.ledger import Ledger
from moa.speculation.tuning import (
    AGAIN,
    FEW,
    GROUPS_PER_OCTAVE,
    HOPE,
    LONGEST,
    MARGIN,
    PRIOR,
    PRIOR_WEIGHT,
    RETRY,
    WEIGHT_IF_FASTER,
    WEIGHT_IF_SLOWER,
)
from moa.tree import TreeShape

_KEEP = 1 - WEIGHT_IF_SLOWER
"""Weight that older drafts keep in the acceptance when another one comes."""


class LevelRates:
    """How often each level of a draft was reached, if the level before was. Older rounds count
    less; so a level that was not tried for a while is expected to do as the prior again, or as the
    level before if that does better."""

    def __init__(self, prior: Sequence[float] | LevelRates) -> None:
        """`prior` is by level, or the rates of others, which may change."""
        self._prior = prior
        self.forget()

    def forget(self) -> None:
        """Expect the prior again."""
        deepest = len(self._prior)
        self._tried = [0.0] * deepest
        self._reached = [0.0] * deepest
        # Made from the two above when asked for; empty: not made yet.
        self._chances: list[float] = []
        self._totals: list[float] = []

    def __len__(self) -> int:
        """The number of levels."""
        return len(self._tried)

    def add(self, reached: int, levels: int) -> None:
        """Count a draft that was to have `levels` levels and reached `reached` of them. A level
        counts as tried if the one before it was reached."""
        for level in range(len(self)):
            was_tried = level <= reached and level < levels
            was_reached = was_tried and level < reached
            self._tried[level] = _KEEP * self._tried[level] + was_tried
            self._reached[level] = _KEEP * self._reached[level] + was_reached
        self._chances = []
        self._totals = []

    def chances(self) -> list[float]:
        """For each level of a draft, the chance that it is reached if the one before was: by the
        rounds that were counted, and with little weight by the prior."""
        if not self._chances:
            prior = self._prior.chances() if isinstance(self._prior, LevelRates) else self._prior
            chance = 0.0
            for tried, reached, usual in zip(self._tried, self._reached, prior, strict=True):
                # `chance` is still that of the level before: a deeper one is expected to do as well.
                expected = max(chance, usual)
                chance = (reached + PRIOR_WEIGHT * expected) / (tried + PRIOR_WEIGHT)
                self._chances.append(chance)
        return self._chances

    def totals(self) -> list[float]:
        """Expected levels reached, of drafts of 1, 2, 3, ... levels."""
        if not self._totals:
            chances_from_the_start = accumulate(self.chances(), mul)
            self._totals = list(accumulate(chances_from_the_start))
        return self._totals


class TextAcceptance:
    """One text: how deep its drafts go of what was asked for, how many levels are accepted, and
    when to try again."""

    def __init__(self, usual: TextAcceptance | None, deepest: int) -> None:
        """Begin a text whose drafts are expected to do as well as `usual`, those of texts of like
        temperature (its class). None makes the record of a class itself."""
        self._usual = usual
        if usual is None:
            self.accepted = LevelRates([PRIOR] * deepest)
            self.drafted = LevelRates([1.0] * deepest)
        else:
            self.accepted = LevelRates(usual.accepted)
            self.drafted = LevelRates(usual.drafted)
        self.drafts = 0
        self.trial = False
        """Whether the draft of the planned round is a trial: one that is made in hope."""
        self.due = 0
        """The round from which on a trial is due."""
        self._wait = RETRY // 2
        """Rounds from the latest draft to the next trial."""

    def add(self, now: int, asked: int, drafted: int, accepted: int) -> None:
        """Count a draft of round `now`: the levels that were `asked` for, those that it had
        (`drafted`), and those that the target `accepted`. Where the drafter was unsure it ends
        early: the levels that are missing count as asked for and not accepted."""
        self.drafts += 1
        self.accepted.add(accepted, asked)
        self.drafted.add(drafted, asked)
        if self._usual is not None and self.drafts <= PRIOR_WEIGHT:
            self._usual.add(now, asked, drafted, accepted)
        # Trials become rarer; they come sooner again where drafts win anything.
        if self.trial:
            self._wait = min(2 * self._wait, LONGEST)
        elif accepted:
            self._wait = max(self._wait // 2, RETRY)
        self.due = now + self._wait
        self.trial = False


class Drafted(NamedTuple):
    """A text's draft in a round."""

    text: TextAcceptance
    asked: int
    """Levels asked for."""
    levels: int
    """Levels that the draft had."""
    nodes: int
    accepted: int


class RoundTime(NamedTuple):
    """What a round took. Other work may be among its `tokens`."""

    tokens: int
    """Tokens of the target's forward."""
    forward_seconds: float
    """With all that is done in every round, drafted or not."""
    draft_seconds: float = 0.0
    """Without what the drafter had to read of earlier rounds."""


class _Best(NamedTuple):
    """Depth and texts with the most expected tokens a second."""

    rate: float
    """Expected tokens a second, of all texts together."""
    depth: int = 0
    places: Sequence[int] = ()
    """Places of the texts that draft, among those of the round."""


class _Outlook(NamedTuple):
    """What is to be expected of a text's draft. Lists begin with a draft of depth 1."""

    place: int
    """Of the text, among those of the round."""
    accepted: Sequence[float]
    """Levels that will be accepted, by the depth that is asked for, times what each counts."""
    drafted: Sequence[float]
    """Levels that the draft will have, by the depth that is asked for."""
    reading: float
    """Seconds that the drafter must read before it can draft."""


class _Decision(NamedTuple):
    """The latest round that was decided on."""

    texts: int
    beside: int
    """Other tokens in its forward."""
    rate: float
    """Expected tokens a second, of all texts together."""


class Policy:
    """How many levels each text of the next round should draft."""

    def __init__(self, shape: TreeShape, *, varies: bool = False) -> None:
        """Plan drafts within this shape, the largest that one may have, before any was measured.
        `varies` says that forwards of one size take different times by themselves, and not only
        beside other programs, because memory does not hold all weights. Then their means are what
        counts, and not the fastest ones; and as each forward leaves other weights in memory, a
        `Ledger` counts what drafts cost behind their own round."""
        self._shape = shape
        self._depths = _depths_up_to(shape.depth)
        """Depths to choose from."""
        self._classes: dict[float, TextAcceptance] = {}
        """Acceptance by temperature."""
        # Of a trial we know nothing: by depth, the levels hoped to be accepted, and all are drafted.
        levels = range(1, shape.depth + 1)
        self._hoped_totals = list(accumulate(HOPE**level for level in levels))
        self._all_drafted = [float(level) for level in levels]

        # What things cost, in seconds.
        self._forward = Cost(mean=varies)
        """Of the target's forward by its tokens, and all else of a round without drafts."""
        self._first_level = Cost()
        """Of a draft's first level, with all that goes before it, by the texts that draft."""
        self._further_level = Cost()
        """Of each further level, by the texts that draft."""
        self._read_seconds = 0.0
        """Of a token that the drafter has missed and must read."""
        self._readings = 0
        """How often the drafter's reading was measured."""
        self._width = 1.0 if shape.breadth == 1 else 2.0
        """Nodes of a level, on average."""

        self._ledger = Ledger() if varies else None
        """What drafts cost beyond their own round."""

        # When to decide and to measure again. All are numbers of rounds.
        self._now = 0
        """Rounds so far."""
        self._review = 0
        """The round of the next decision."""
        self._latest_plain = 0
        """The latest round without a draft."""
        self._plain_rounds = 0
        self._latest_draft = 0
        """The latest round with a draft."""
        self._draft_rounds = 0
        self._probe_after = AGAIN
        """Plain rounds since the latest draft until a probe."""
        self._latest = _Decision(texts=1, beside=0, rate=0.0)

    def text(self, temperature: float) -> TextAcceptance:
        """A new text. How well drafts do depends on the temperature. Clients choose that, so
        temperatures are rounded: else they could make us keep ever more classes."""
        rounded = round(temperature, 1)
        if rounded not in self._classes:
            self._classes[rounded] = TextAcceptance(None, self._shape.depth)
        self._review = 0
        return TextAcceptance(self._classes[rounded], self._shape.depth)

    def plan(
        self,
        texts: Sequence[TextAcceptance],
        unread: Iterable[int | None],
        beside: int = 0,
        worth: Sequence[float] = (),
    ) -> list[int]:
        """How many levels to draft for each text of the next round; 0: decode it plainly.

        For each text `unread` says how many tokens, those of the latest round left out, the drafter
        must read before it can draft; None: it cannot draft for this one. `beside` is how many
        other tokens are in the forward. `worth` is what a token of each text counts, 1 on average;
        unless given, all count the same.
        """
        depths = [0] * len(texts)
        if not texts:
            return depths
        self._now += 1
        plain_seconds = self._forward.seconds(len(texts) + beside)
        if self._now < self._review or not plain_seconds:
            return depths
        deepest = self._shape.depth if self._ledger is None else self._ledger.deepest
        if not deepest:
            return depths
        missed = {place: tokens for place, tokens in enumerate(unread) if tokens is not None}
        reading = self._seconds_to_read(missed)
        best = self._decide(texts, reading, beside, plain_seconds, worth or [1.0] * len(texts))
        self._latest = _Decision(texts=len(texts), beside=beside, rate=best.rate)
        for place in self._without_long_reading(best.places, missed, reading, plain_seconds):
            depths[place] = min(best.depth, deepest)
            texts[place].trial = self._now >= texts[place].due
            if texts[place].trial:
                texts[place].accepted.forget()
        return depths

    def _decide(
        self,
        texts: Sequence[TextAcceptance],
        reading: dict[int, float],
        beside: int,
        plain_seconds: float,
        worth: Sequence[float],
    ) -> _Best:
        """Decide on the depth of drafts, and which texts should draft to it: what is best by all
        that is known, or in some rounds what is to be measured again."""
        if self._plain_is_to_be_measured():
            return _Best(rate=len(texts) / plain_seconds)
        best = self._best(texts, reading, beside, plain_seconds, worth)
        if best.depth:
            self._probe_after = AGAIN
            return best
        self._review = self._now + FEW
        if not self._probe_is_due(reading, plain_seconds):
            return best
        self._probe_after = min(2 * self._probe_after, LONGEST)
        cheapest = min(reading, key=reading.__getitem__)
        return _Best(rate=best.rate, depth=1, places=[cheapest])

    def _seconds_to_read(self, missed: dict[int, int]) -> dict[int, float]:
        """What reading so many missed tokens takes, by the text's place."""
        is_cold = self._readings < 2
        each = self._read_seconds / FEW if is_cold else self._read_seconds
        return {place: each * tokens for place, tokens in missed.items()}

    def _plain_is_to_be_measured(self) -> bool:
        """Whether this round should be plain, to learn whether plain decoding has become faster."""
        return self._now - self._latest_plain > min(AGAIN, FEW * self._plain_rounds)

    def _probe_is_due(self, reading: dict[int, float], plain_seconds: float) -> bool:
        """Whether to draft one level although plain decoding seems best, to learn whether drafting
        has become cheaper; only if some text needs little reading for it."""
        rounds = self._now - self._latest_draft
        if rounds <= self._probe_after or not reading:
            return False
        return min(reading.values()) < (MARGIN - 1) * rounds * plain_seconds

    def _without_long_reading(
        self,
        places: Sequence[int],
        missed: dict[int, int],
        reading: dict[int, float],
        plain_seconds: float,
    ) -> Iterator[int]:
        """Yield the places of the texts that draft now, out of those that should.

        A drafter must first read the tokens of a text that it has `missed`, and all texts of the
        round wait for that. So texts that together need more than a plain round for it draft later.
        The first text that needs reading always gets it; alone, as long as nobody has measured what
        reading takes.
        """
        stalled = 0.0
        readers = 0
        for place in places:
            if missed[place]:
                stalled += reading[place]
                readers += 1
                is_long = stalled > plain_seconds or not self._readings
                if readers > 1 and is_long:
                    continue
            yield place

    def _best(
        self,
        texts: Sequence[TextAcceptance],
        reading: dict[int, float],
        beside: int,
        plain_seconds: float,
        worth: Sequence[float],
    ) -> _Best:
        """Find the depth of drafts, and the texts that draft to it, with the most expected tokens a
        second: accepted ones of all texts, by the time of drafting, reading and the target's
        forward. Depth 0, plain decoding, unless some depth is clearly faster.

        `reading` has, by the text's place in the round, the seconds that the drafter must read
        before it can draft; texts for which it cannot are not in it. `worth` is what a token of
        each text counts.
        """
        all_texts = len(texts)
        best = _Best(rate=MARGIN * all_texts / plain_seconds)
        drafters = [
            self._outlook(texts[place], place, reading[place], worth[place]) for place in reading
        ]
        # Tokens that a second of reading costs in each of the next rounds: what was read serves
        # some rounds (`FEW`), over which its cost is spread.
        tokens_for_reading = all_texts / plain_seconds / FEW
        for depth in self._depths:
            level = depth - 1  # the lists begin with depth 1
            # First the texts whose drafts win most tokens beyond what their reading costs.
            order = sorted(
                drafters,
                key=lambda text: tokens_for_reading * text.reading - text.accepted[level],
            )
            for count, tokens, seconds in self._rounds(order, depth, all_texts, beside):
                if tokens > best.rate * seconds:
                    places = [text.place for text in order[:count]]
                    best = _Best(rate=tokens / seconds, depth=depth, places=places)
        return best

    def _outlook(self, text: TextAcceptance, place: int, reading: float, worth: float) -> _Outlook:
        """Returns what is to be expected of a text's draft; if a trial is due, what is hoped for.
        Accepted levels count what a token of the text is `worth`."""
        accepted: Sequence[float] = text.accepted.totals()
        drafted: Sequence[float] = text.drafted.totals()
        if self._now >= text.due:
            accepted = self._hoped_totals
            drafted = self._all_drafted
        if worth != 1:
            accepted = [worth * level for level in accepted]
        return _Outlook(place, accepted, drafted, reading)

    def _rounds(
        self, order: Sequence[_Outlook], depth: int, all_texts: int, beside: int
    ) -> Iterator[tuple[int, float, float]]:
        """Yield the rounds in which the first of these texts draft to this depth: how many texts
        draft, the tokens that all texts together are expected to win, and the seconds."""
        level = depth - 1  # the lists begin with depth 1
        tokens = float(all_texts)
        all_levels = 0.0
        longest = 0.0
        read_seconds = 0.0
        for count, text in enumerate(order, 1):
            levels = text.drafted[level]
            tokens += text.accepted[level]
            all_levels += levels
            if levels > longest:
                longest = levels
            read_seconds += text.reading
            is_power_of_two = count & (count - 1) == 0
            if not is_power_of_two and count < len(order):
                continue  # one, two, four, ... or all: close enough, and quick
            seconds = self._drafting_seconds(count, longest) + read_seconds / FEW
            seconds += self._forward.seconds(all_texts + beside + self._width * all_levels)
            yield count, tokens, seconds

    def _drafting_seconds(self, texts: int, levels: float) -> float:
        """Seconds of drafts of so many levels for so many texts at once."""
        seconds = self._first_level.seconds(texts)
        seconds += (levels - 1) * self._further_level.seconds(texts)
        is_cold = self._draft_rounds < FEW
        return seconds / FEW if is_cold else seconds

    def shape(self, levels: int, worth: float = 1.0) -> TreeShape:
        """The shape of a draft of so many levels, as planned by the latest `plan`, for a text of
        which a token is `worth` so much. A node must promise as many tokens as its time in the
        target's forward is worth, and a level as many as the drafter's time for it is worth, both
        at the expected tokens a second."""
        texts, beside, rate = self._latest
        rate /= worth
        node_seconds = self._forward.added(FEW, beside=texts + beside) / FEW
        level_seconds = self._further_level.seconds(texts)
        return replace(
            self._shape,
            depth=levels,
            min_score=max(self._shape.min_score, _log_of_asked(rate * level_seconds / texts)),
            least=max(self._shape.least, _log_of_asked(rate * node_seconds)),
        )

    def matching(self, text: TextAcceptance) -> float:
        """How many accepted tokens a draft for this text that costs nothing to make, such as
        guesses of the device, must promise to be worth as much as the best draft of our own
        drafter."""
        # The latest round: its texts, and the tokens that the forward ran beside them.
        texts, beside, _ = self._latest
        plain_seconds = self._forward.seconds(texts + beside)
        if not plain_seconds:
            return 0.0  # nothing was measured yet
        best = 1.0
        for depth in self._depths:
            levels = text.drafted.totals()[depth - 1]
            tokens = 1 + text.accepted.totals()[depth - 1]
            seconds = self._drafting_seconds(texts, levels)
            seconds += self._forward.seconds(beside + texts * (1 + self._width * levels))
            best = max(best, tokens * plain_seconds / max(plain_seconds, seconds))
        return best - 1.0

    def read(self, tokens: int, seconds: float) -> None:
        """Learn that the drafter took so long to read so many tokens of earlier rounds."""
        self._readings += 1
        each = seconds / tokens
        # The first reading of a process may be several times too slow, so a faster second one
        # replaces it.
        replaces = self._readings == 1 or (self._readings == 2 and each < self._read_seconds)
        weight = 1.0 if replaces else WEIGHT_IF_FASTER
        self._read_seconds += weight * (each - self._read_seconds)

    def record(self, drafts: Sequence[Drafted], ran: RoundTime) -> None:
        """Learn from a round: from its drafts, none if it was plain, how deep they are accepted,
        and from its times what forward and drafting cost."""
        self._forward.observe(ran.tokens, ran.forward_seconds)
        if self._ledger is not None:
            self._count(self._ledger, drafts, ran)
        if not drafts:
            self._plain_rounds += 1
            self._latest_plain = self._now
            return
        self._latest_draft = self._now
        self._draft_rounds += 1
        levels = max(1, *(draft.levels for draft in drafts))
        self._learn_levels(len(drafts), levels, ran.draft_seconds)
        for draft in drafts:
            if draft.levels:
                self._width += WEIGHT_IF_SLOWER * (draft.nodes / draft.levels - self._width)
            draft.text.add(self._now, draft.asked, draft.levels, draft.accepted)

    def _count(self, ledger: Ledger, drafts: Sequence[Drafted], ran: RoundTime) -> None:
        """Count what a round has won, and how long it took; that of one with several texts, or with
        other work beside them, as if it had been over a single token without drafts."""
        without_drafts = ran.tokens - sum(draft.nodes for draft in drafts)
        single = self._forward.seconds(1) / self._forward.seconds(without_drafts)
        seconds = single * (ran.forward_seconds + ran.draft_seconds)
        if not drafts:
            ledger.plain(seconds)
            return
        levels = max(draft.asked for draft in drafts)
        accepted = sum(draft.accepted for draft in drafts)
        ledger.drafted(levels, 1 + accepted / self._latest.texts, seconds)

    def _learn_levels(self, texts: int, levels: int, seconds: float) -> None:
        """Learn what levels cost from a draft of so many levels for so many texts. Only the seconds
        of the whole are known: if it took longer or less than expected, each level is taken to have
        done so in the same proportion."""
        mean = seconds / levels
        first = self._first_level.seconds(texts)
        further = self._further_level.seconds(texts) or first
        expected = first + (levels - 1) * further
        # An estimate of 0 was never measured: then each level is taken for the mean one.
        self._first_level.observe(texts, seconds * first / expected if first else mean)
        if levels > 1:
            self._further_level.observe(texts, seconds * further / expected if further else mean)
        elif mean < further:
            # A whole draft of one level was cheaper than a further level seemed to be.
            self._further_level.observe(texts, mean)


def _depths_up_to(deepest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, 16, ... and the deepest: sizes that `Cost` tells apart."""
    steps = range(math.ceil(GROUPS_PER_OCTAVE * math.log2(deepest)))
    depths = {round(2 ** (step / GROUPS_PER_OCTAVE)) for step in steps}
    return sorted({depth for depth in depths if depth < deepest} | {deepest})


def least_chance(forward: Cost, rows: int) -> float:
    """The chance of being accepted from which on one more token of a draft pays, in a forward of so
    many sessions: it saves its session a forward, and makes this one longer for all. Likelier ones
    than not may always go along."""
    token_seconds = forward.added(FEW, beside=rows) / FEW
    return min(0.5, token_seconds * rows / forward.seconds(rows))


def _log_of_asked(chance: float) -> float:
    """The log-probability that a draft must have to promise `chance`: nothing is asked for what
    costs nothing, and never certainty."""
    if chance <= 0:
        return -math.inf
    return math.log(min(chance, 1 / MARGIN))
