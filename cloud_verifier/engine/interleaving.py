"""Decides when background work runs between rounds: layers of a prompt's forward, and activation records. No I/O, no
clock: the caller passes times.

Background work runs in pieces, and a round that comes waits for the piece that runs. Each round earns credit, a share
of its own time. A piece runs if the credit pays for it, if a round would hardly notice it, or if it ends before the
next round is likely to come; otherwise the model is left to that round, but for no longer than the piece takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SHARE, _SHARE_BESIDE = 0.25, 0.1
"""Background work between two forwards with rounds, of the time of one: by itself, and where prompts are in these
forwards too. So a round waits a quarter longer for the prompts of others, or hardly more."""
RECENT = 0.1
"""Seconds: a session that got its verdict this lately is about to send the next draft; then it has gone."""
_GAP_GROWS = 0.1
"""How fast longer gaps are believed in; shorter ones are at once."""
_SURE, _PART = 0.9, 0.3
"""Of such a gap, what is sure to be free; and how long a piece may take that is to be run in it."""


class Interleaving:
    """What background work has earned, and how soon the next round is likely to come."""

    def __init__(self, now: float) -> None:
        self._credit, self._idle_since = 0.0, now
        """Seconds that background work has coming, because rounds ran instead; and since when nothing has run."""
        self._round, self._share = 0.0, _SHARE
        """Seconds of a forward like the latest one with rounds, without the prompts in it; and what of it is earned."""
        self._ended, self._gap, self._gap_open = -math.inf, 0.0, False
        """When the latest rounds had run; how soon after that one is ready, at the soonest; and whether none is yet."""

    # ---- what happens

    def rounds_begin(self, seconds: float, *, prompts: bool) -> None:
        """A forward with rounds begins. Without the `prompts` in it, if any, it would take so long."""
        self._round, self._share = seconds, _SHARE_BESIDE if prompts else _SHARE

    def rounds_end(self, began: float, now: float) -> None:
        """They have run: their sessions have their verdicts, and will soon be here again."""
        self._credit += self._share * (now - began)
        self._ended = self._idle_since = now
        self._gap_open = True

    def round_ready(self, now: float) -> None:
        """A round is ready: the gap since the latest ones is over."""
        if self._gap_open:
            self._gap_open, gap = False, now - self._ended
            if gap < RECENT:  # otherwise they had gone, which says nothing of those who stay
                self._gap = min(gap, self._gap + _GAP_GROWS * (gap - self._gap))

    def piece_ends(self, began: float, now: float) -> None:
        """A piece of background work has run."""
        self._credit = max(0.0, self._credit - (now - began))
        self._idle_since = now

    def nothing_waits(self) -> None:
        """There is no background work: what it has not used is lost."""
        self._credit = 0.0

    # ---- what may run

    @property
    def has_credit(self) -> bool:
        """Whether background work has anything coming."""
        return self._credit > 0

    @property
    def longest(self) -> float:
        """Seconds of a piece that fits between rounds."""
        return max(self._share * self._round, _PART * self._gap)

    def unnoticed(self, piece: float) -> bool:
        """Whether a round that waits for a piece of so many seconds hardly notices."""
        return piece <= self._share * self._round

    def goes_first(self, piece: float) -> bool:
        """Whether the piece runs although rounds are ready."""
        return self._credit >= piece

    def room(self, now: float) -> float:
        """Seconds of the longest piece that may run now, although rounds are about to come."""
        return max(self._share * self._round, self._soonest - now, self._waited_for(now))

    def hold(self, piece: float, now: float) -> float:
        """Seconds for which the piece leaves the model to rounds that are about to come."""
        return 0.0 if piece <= self.room(now) else piece - self._waited_for(now)

    @property
    def _soonest(self) -> float:
        return self._ended + _SURE * self._gap

    def _waited_for(self, now: float) -> float:
        """The piece that rounds, by running or by staying away, have left enough time for."""
        return self._credit + now - max(self._idle_since, self._soonest)


@dataclass(slots=True)
class PiecewiseForward:
    """A forward that runs piece by piece, and what is known of its time."""

    pieces: int
    predicted: float
    """Seconds of all pieces."""
    spent: float = 0.0
    ran: int = 0

    def piece_ends(self, seconds: float) -> None:
        """The next piece took so long."""
        self.spent += seconds
        self.ran += 1

    @property
    def piece(self) -> float:
        """Seconds of the next one: those before it say it best."""
        return self.spent / self.ran if self.ran else self.predicted / self.pieces

    @property
    def complete(self) -> bool:
        """Whether all have run."""
        return self.ran == self.pieces
