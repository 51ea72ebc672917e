"""Predicts the time of a forward from its number of tokens, by linear regression over past forwards. No clock, no
torch."""

from __future__ import annotations

_MEMORY = 0.98
"""Weight that each older forward keeps: the last fifty or so count."""
_PRIOR = ((1, 0.005), (256, 0.1))
"""Tokens and seconds assumed before anything has run."""
_PRIOR_WEIGHT = 0.01


class ForwardTime:
    """A weighted linear fit: seconds = fixed + each * tokens."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for tokens, seconds in _PRIOR:
            self.observe(tokens, seconds, weight=_PRIOR_WEIGHT)

    def observe(self, tokens: int, seconds: float, *, weight: float = 1.0) -> None:
        """A forward of so many tokens took so long."""
        self._n = self._n * _MEMORY + weight
        self._x = self._x * _MEMORY + weight * tokens
        self._y = self._y * _MEMORY + weight * seconds
        self._xx = self._xx * _MEMORY + weight * tokens * tokens
        self._xy = self._xy * _MEMORY + weight * tokens * seconds

    @property
    def each(self) -> float:
        """Seconds of one more token; never below 0."""
        return self._line()[1]

    def seconds(self, tokens: int) -> float:
        """How long a forward of so many tokens will take."""
        fixed, each = self._line()
        return fixed + each * tokens

    def worth(self, rows: int) -> float:
        """The chance of being accepted from which on one more token pays, in a forward of so many sessions: it costs
        `each`, and saves its session a forward, of which the others pay their share. What is as likely as not always
        may go along: while all forwards are of one size, nobody knows what a token costs."""
        return min(0.5, self.each * rows / self.seconds(rows))

    def _line(self) -> tuple[float, float]:
        spread = self._xx - self._x * self._x / self._n
        each = max(0.0, (self._xy - self._x * self._y / self._n) / spread) if spread > 1e-9 else 0.0
        fixed = (self._y - each * self._x) / self._n
        # If all forwards had the same size, the two cannot be separated: then all time counts as the tokens'.
        return (fixed, each) if fixed > 0 else (0.0, self._xy / self._xx)

    def beside(self, tokens: int, share: float, most: int) -> int:
        """How many more tokens, `most` at most, can be added to `tokens` for `share` of their time."""
        each = self.each
        return most if each <= 0 else min(most, int(share * self.seconds(tokens) / each))
