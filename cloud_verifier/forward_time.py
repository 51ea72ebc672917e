"""How long a target's forwards take where `--emulate` says so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from moa.errors import ConfigError

_SECONDS = {"ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(ms|s)")
_LONGEST = 60.0
"""Seconds: the engine counts as dead when no forward ends for that long."""


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """How long a forward takes, in seconds."""

    forward: float
    """Over one token."""
    token: float = 0.0
    """For each token more, as where reading a prompt is bound by arithmetic."""

    @classmethod
    def of(cls, text: str) -> Self:
        """The times that a text like `250ms` or `250ms+20ms` says: of a forward over one token, and
        of each token more."""
        times = [_TIME.fullmatch(part) for part in text.split("+")]
        if len(times) > 2 or None in times:
            raise ConfigError(
                f"--emulate takes a time, not {text!r}",
                hint="250ms a forward, or 250ms+20ms: so much more for each token after the first",
            )
        seconds = [float(found[1]) * _SECONDS[found[2]] for found in times if found is not None]
        if max(seconds) > _LONGEST:
            raise ConfigError(f"--emulate takes at most {_LONGEST:.0f}s, not {text!r}")
        return cls(*seconds)

    def seconds(self, tokens: int) -> float:
        """Of a forward over so many tokens."""
        return self.forward + self.token * max(0, tokens - 1)
