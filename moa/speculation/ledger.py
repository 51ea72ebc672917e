"""What drafts win or lose by the clock where memory does not hold all weights. Pure: no clock.

There a forward over a draft pushes weights out of memory that the plain rounds behind it need. So
what a draft costs is seen only behind it, and seconds by the size of a forward do not tell.

    ledger = Ledger()
    depth = min(depth, ledger.deepest)      # before a round; 0: decode plainly
    ledger.drafted(depth, rounds, seconds)  # after it: so many plain rounds would have won as much
    ledger.plain(seconds)                   # or after a plain one

* Plain decoding is measured first, and only by rounds that are not behind drafts.
* Drafts in a row are judged together: by their seconds, and by what the plain rounds behind them
  took beyond others, beside the seconds of plain rounds for the same tokens.
* A trial is a draft that is deeper than any that has not lost: of one level at first, then of twice
  as many each time. Behind it come plain rounds, until they show what it has cost.
* What was lost is earned back before the next trial: so trials take a small share of all time.
* Drafts that won once and lose now end within a few rounds. Then one level is a trial again.
"""

from __future__ import annotations

from moa.speculation.tuning import AGAIN, FEW, LONGEST, MARGIN, RETRY, WEIGHT_IF_SLOWER

_SHARE = (MARGIN - 1) / 2
"""Of all time, what trials may lose: half of what a draft must promise to win."""


class Ledger:
    """How deep drafts may be, by what they won in the time that they and the plain rounds behind
    them took."""

    def __init__(self) -> None:
        """Nothing is known: plain decoding is measured first."""
        self._plain_seconds = 0.0
        """Of a plain round that is not behind drafts; a mean."""
        self._plain_rounds = 0
        """How many of these were measured."""
        self._won = 0.0
        """Plain rounds that would have won all tokens so far."""
        self._next_trial = 0.0
        """What must be won before drafts may be deeper than `_proven`."""
        self._proven = 0
        """Drafts of so many levels have not lost."""

        # The latest drafts in a row, and the plain rounds behind them.
        self._is_open = True
        """Whether it is not known yet what these have cost."""
        self._levels = 0
        """Of the deepest."""
        self._lost_seconds = 0.0
        """More than plain rounds would have taken for the same tokens."""
        self._behind = 0
        """Plain rounds behind them."""
        self._behind_seconds = 0.0
        """More than these would have taken if they were not behind drafts."""

    @property
    def deepest(self) -> int:
        """How many levels the drafts of the next round may have; 0: it is to be plain."""
        if self._plain_rounds < RETRY:
            return 0
        if self._is_open:
            is_trial = self._levels > self._proven
            loses = self._to_earn(self._lost_seconds) > AGAIN
            if is_trial or loses or self._behind:
                return 0  # what these drafts cost is seen in plain rounds alone
        is_due = self._won >= self._next_trial
        return max(1, 2 * self._proven) if is_due else self._proven

    def drafted(self, levels: int, rounds: float, seconds: float) -> None:
        """Count a round with drafts of so many levels at most. Its tokens would have taken so many
        plain `rounds`."""
        if not self._plain_rounds:
            return  # there is nothing to compare them with
        self._won += rounds
        if not self._is_open or levels > self._proven:
            self._is_open = True
            self._lost_seconds = 0.0
            self._levels = 0
        self._levels = max(self._levels, levels)
        self._lost_seconds += seconds - rounds * self._plain_seconds
        self._behind = 0
        self._behind_seconds = 0.0

    def plain(self, seconds: float) -> None:
        """Count a plain round."""
        self._won += 1
        if not self._is_open:
            self._plain_rounds += 1
            weight = max(WEIGHT_IF_SLOWER, 1 / self._plain_rounds)
            self._plain_seconds += weight * (seconds - self._plain_seconds)
            return
        self._behind += 1
        self._behind_seconds += seconds - self._plain_seconds
        # Fewer rounds do if, by these, all of them will not cost what the drafts have won.
        expected = self._behind_seconds * FEW / self._behind
        if self._behind < FEW and (not self._levels or expected > -self._lost_seconds):
            return
        self._is_open = False
        if self._levels:
            self._judge(self._lost_seconds + self._behind_seconds)

    def _judge(self, lost_seconds: float) -> None:
        """Decide what follows from the latest drafts in a row, which have lost so much, or won."""
        if lost_seconds <= 0:
            self._proven = max(self._proven, self._levels)
            return
        if self._levels <= self._proven:
            self._proven = 0
        self._next_trial = self._won + min(LONGEST, self._to_earn(lost_seconds))

    def _to_earn(self, lost_seconds: float) -> float:
        """The plain rounds that earn back what was lost."""
        return lost_seconds / (_SHARE * self._plain_seconds)
