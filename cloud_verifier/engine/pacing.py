"""How much work that can wait runs beside rounds: pieces of prompts, and activation records. Pure:
the caller passes times.

One rule: a round earns credit, a quarter of its own time. Prompt pieces in the same forward, and
records between rounds, pay with it. Between rounds a piece also runs if it takes no more than that
quarter, if it ends before the next round is likely to come, or when rounds have stayed away for as
long as it takes. Pieces may take as much time as the rounds beside them where more prompts wait
than rounds run, and for a principal that has been served less than another one of these rounds:
else most people would wait for a few, or who asks for little for who asks for much. The prompt of
such a principal need not wait for rounds of others that are about to come.
"""

from __future__ import annotations

import math

_SHARE = 0.25
"""Credit of a round, of its seconds."""
_LARGEST_SHARE = 1.0
"""The most that pieces of prompts may take, of the seconds of a forward's rounds."""
RECENT = 0.1
"""So many seconds after its verdict a session is expected to send its next round; then it has
gone."""
_LONGER_GAP_WEIGHT = 0.1
"""Weight of a gap that is longer than expected; a shorter one counts at once."""
_SURE = 0.9
"""The share of the expected gap that is taken to be free of rounds."""


class Pacing:
    """The credit of work that can wait, and how soon the next round is likely to come."""

    def __init__(self, now: float) -> None:
        """Begin without credit, and without a round that has run."""
        self._credit = 0.0
        """Seconds owed to work that can wait."""
        self._idle_since = now
        """The end of the latest work of either kind."""
        self._round = 0.0
        """Seconds of a forward like the latest one with rounds, without the prompts in it."""
        self._ended = -math.inf
        """The end of the latest rounds."""
        self._gap = 0.0
        """Seconds from the end of rounds until the next one is ready, where they come soon."""
        self._gap_open = False
        """Whether no round has become ready since the latest ones ended."""

    # ---- what has happened

    def rounds_ran(self, seconds: float, beside: float, now: float) -> None:
        """Note that a forward has ended that took `seconds` for its rounds and `beside` seconds
        more for pieces of prompts. The rounds earn credit for work that can wait; the pieces spend
        it."""
        self._credit = max(0.0, self._credit + _SHARE * seconds - beside)
        self._round = seconds
        self._ended = now
        self._idle_since = now
        self._gap_open = True

    def round_ready(self, now: float) -> None:
        """Note that a round is ready to run, and learn how soon that was after the latest ones. A
        short gap counts at once, a longer one only a little: work in the gap must not delay the
        next round."""
        if not self._gap_open:
            return
        self._gap_open = False
        gap = now - self._ended
        if gap < RECENT:  # otherwise its session had gone, which says nothing of those who stay
            self._gap = min(gap, self._gap + _LONGER_GAP_WEIGHT * (gap - self._gap))

    def piece_ran(self, began: float, now: float) -> None:
        """Note a piece that has run between rounds, and has paid with credit."""
        self._credit = max(0.0, self._credit - (now - began))
        self._idle_since = now

    def nothing_waits(self) -> None:
        """Note that nothing waits that could use credit: it expires."""
        self._credit = 0.0

    # ---- what may run

    def beside(self, seconds: float, *, rounds: int, prompts: int, owed: bool) -> float:
        """Seconds by which prompts may make a forward longer whose `rounds` take so many `seconds`.
        One long prompt hardly delays the rounds; the more prompts wait for each round, the longer
        these wait for them. A prompt is `owed` where some of the rounds are of a principal that has
        been served more: these would have no place in the forward if all were asked in turn."""
        share = _LARGEST_SHARE if owed else (prompts - 1) / rounds
        return self._credit + min(max(_SHARE, share), _LARGEST_SHARE) * seconds

    def room(self, now: float) -> float:
        """Seconds of the longest piece that may run by itself now, although rounds are about to
        come."""
        return max(_SHARE * self._round, self._soonest - now, self._stayed_away(now))

    @property
    def room_of_owed(self) -> float:
        """Seconds that an owed prompt may take in any forward, although rounds wait or are about to
        come: as many as the latest ones took with their drafts."""
        return _LARGEST_SHARE * self._round

    def room_with_credit(self, now: float) -> float:
        """Seconds of the longest piece that may run now, where it is of work that runs only between
        rounds: it pays with credit."""
        return max(self.room(now), self._credit + self._stayed_away(now))

    def hold(self, piece: float, now: float) -> float:
        """Seconds to wait until a piece that takes `piece` seconds may run by itself."""
        return 0.0 if piece <= self.room(now) else piece - self._stayed_away(now)

    @property
    def _soonest(self) -> float:
        """When the next round may be ready, at the soonest."""
        return self._ended + _SURE * self._gap

    def _stayed_away(self, now: float) -> float:
        """Seconds since a round was to be expected and none has come, in which nothing else ran
        either; less than 0 before one is to be expected."""
        return now - max(self._idle_since, self._soonest)
