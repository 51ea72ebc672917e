"""Log lines about what strangers send: one of a kind now and then, however often it happens, with how
many there were since the last. Kinds are few and named by us."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS = 10.0
"""Between two lines of a kind."""


@dataclass
class _Kind:
    """What is known of one kind."""

    next_line: float
    """When another line of it may be written."""
    left_out: int = 0


class RareLines:
    """Warnings of one port, or of one endpoint."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def warn(self, kind: str, words: str, peer: str, event: str, /, **more: str) -> None:
        """Log these words about something of this kind that the `peer`, an address, has done; or
        count it for the kind's next line, where its last one was a moment ago. `more` are other
        fields of the record."""
        now = self._clock()
        known = self._kinds.setdefault(kind, _Kind(now))
        if now < known.next_line:
            known.left_out += 1
            return
        if known.left_out:
            words += f" ({known.left_out} more of these since the last such line)"
        self._kinds[kind] = _Kind(now + _SECONDS)
        self._log.warning("%s", words, extra={"peer": peer, "event": event, **more})
