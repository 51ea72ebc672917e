"""Predicts the time of a forward from its tokens and what they look at, by linear regression over past forwards. No
clock, no torch."""

from __future__ import annotations

from collections.abc import Iterable

_MEMORY = 0.98
"""Weight that each older forward keeps: the last fifty or so count."""
_PRIOR = ((1, 0.005), (256, 0.1))
"""Tokens and seconds assumed before anything has run."""
_PRIOR_WEIGHT = 0.01
_READING = 12
"""To fetch a session's keys and values costs about as much as so many of its tokens looking at them."""
_DISTINCT = 0.01
"""How little tokens and looks may go together, of 1, for a fit to tell the one's cost from the other's."""
_MUCH = 1.1
"""So much more must looks explain than tokens, where only one of the two can be told to cost anything."""


def looks(rows: Iterable[tuple[int, int]]) -> float:
    """What the attention of a forward has to do: rows of so many tokens, each after so many others."""
    return float(sum((size + _READING) * context for size, context in rows))


class ForwardTime:
    """A weighted linear fit: seconds = fixed + each * tokens + look * looks. A prompt of thousands of tokens is mostly
    looks at its end, and short drafts hardly any."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._z = 0.0
        self._xx = self._xy = self._xz = self._yz = self._zz = 0.0
        for tokens, seconds in _PRIOR:
            self.observe(tokens, seconds, weight=_PRIOR_WEIGHT)

    def observe(self, tokens: int, seconds: float, looks: float = 0.0, *, weight: float = 1.0) -> None:
        """A forward of so many tokens took so long."""
        self._n = self._n * _MEMORY + weight
        self._x = self._x * _MEMORY + weight * tokens
        self._y = self._y * _MEMORY + weight * seconds
        self._z = self._z * _MEMORY + weight * looks
        self._xx = self._xx * _MEMORY + weight * tokens * tokens
        self._xy = self._xy * _MEMORY + weight * tokens * seconds
        self._xz = self._xz * _MEMORY + weight * tokens * looks
        self._yz = self._yz * _MEMORY + weight * seconds * looks
        self._zz = self._zz * _MEMORY + weight * looks * looks
        self._line = self._fit()

    @property
    def each(self) -> float:
        """Seconds of one more token that looks at nothing; never below 0."""
        return self._line[1]

    def seconds(self, tokens: int, looks: float = 0.0) -> float:
        """How long a forward of so many tokens will take."""
        fixed, each, look = self._line
        return fixed + each * tokens + look * looks

    def worth(self, rows: int) -> float:
        """The chance of being accepted from which on one more token pays, in a forward of so many sessions: it costs
        `each`, and saves its session a forward, of which the others pay their share. What is as likely as not always
        may go along: while all forwards are of one size, nobody knows what a token costs."""
        return min(0.5, self.each * rows / self.seconds(rows))

    def beside(self, tokens: int, share: float, most: int) -> int:
        """How many more tokens, `most` at most, can be added to `tokens` for `share` of their time."""
        return self.fitting(share * self.seconds(tokens), 0, most)

    def fitting(self, seconds: float, context: int, most: int) -> int:
        """How many more tokens, `most` at most, of a session that holds `context`, make a forward longer by this."""
        _, each, look = self._line
        price = each + look * context
        left = seconds - look * _READING * context
        return max(0, min(most, int(left / price))) if price > 0 and left < price * most else most

    def added(self, tokens: int, context: int) -> float:
        """How much longer a forward takes with so many more tokens of a session that holds `context`."""
        _, each, look = self._line
        return each * tokens + look * (tokens + _READING) * context

    def _fit(self) -> tuple[float, float, float]:
        n, x, y, z = self._n, self._x, self._y, self._z
        each, look = _solved(
            self._xx - x * x / n, self._xz - x * z / n, self._zz - z * z / n, self._xy - x * y / n, self._yz - y * z / n
        )
        fixed = (y - each * x - look * z) / n
        if fixed > 0:
            return fixed, each, look
        # If all forwards had the same size, fixed and each cannot be separated: then all time counts as the tokens'.
        each, look = _solved(self._xx, self._xz, self._zz, self._xy, self._yz)
        return (0.0, each, look) if each > 0 else (0.0, self._xy / self._xx, 0.0)


def _solved(xx: float, xz: float, zz: float, xy: float, yz: float) -> tuple[float, float]:
    """The slopes of y by x and z, none of them below 0; where they cannot be told apart by x alone, or by z if that
    explains much more."""
    left = xx * zz - xz * xz
    if left > max(1e-9, _DISTINCT * xx * zz):
        by_x, by_z = (xy * zz - yz * xz) / left, (yz * xx - xy * xz) / left
        if by_x >= 0 and by_z >= 0:
            return by_x, by_z
    by_x, by_z = (max(0.0, xy) / xx if xx > 1e-9 else 0.0), (max(0.0, yz) / zz if zz > 1e-9 else 0.0)
    return (0.0, by_z) if by_z * yz > _MUCH * by_x * xy else (by_x, 0.0)
