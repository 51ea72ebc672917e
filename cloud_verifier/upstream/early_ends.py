"""How often an upstream may end its part of an answer early. Pure.

What it wrote is kept, and the rest is asked for again: that is how a cut is mended. A service that
ends every part early would be asked until the answer is as long as it may be, and is paid for the
whole text before it each time.
"""

from __future__ import annotations

MOST = 4
"""Early ends that are mended in an answer before it has grown by `FRESH` tokens."""
FRESH = 64
"""Tokens of progress after which they are counted from zero: a bad link cuts a long answer often."""
ROOM = 64
"""Tokens that are asked for at least where an upstream has called its part long enough before: its
tokens are shorter than the device's, and each part would be a share of the little that is left."""


class EarlyEnds:
    """Of one answer."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0
        """Tokens that the answer had when the count began."""
        self.short = False
        """Whether a part has ended because it was long enough by the upstream's own tokens."""

    def add(self, tokens: int) -> int:
        """Note that a part has ended early, when the answer had so many tokens. Returns how many
        did in a row if that is too often, else 0."""
        if tokens - self._since >= FRESH:
            self._count = 0
            self._since = tokens
        self._count += 1
        return self._count if self._count > MOST else 0
