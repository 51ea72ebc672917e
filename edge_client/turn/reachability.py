"""Whether the verifier can be asked in a turn: the state of the link, failures in a row, what a
refusal means. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from edge_client.events import Link
from edge_client.link.retry import Retry
from moa.safe_text import safe_line
from moa.wire import Code
from moa.wire.messages import Error

_SETBACKS = 8
"""Attempts to repair a session without a verified token in between; then the device continues
offline in this turn."""
_NO_ROOM = (Code.BUSY, Code.DEADLINE)
"""Refusals for now because of what others, or this user's other sessions, do."""
RATE = "max_tokens_per_second"
"""The limit of a user's own rate at the verifier."""
RATE_USED_UP = "your rate at {} is used up"
"""What a refusal by that limit means for the reader; {} is who verifies."""
_AFTER_SECONDS = 2.0
"""For so long behind the pause that such a refusal asked for, what comes is still no faster than the
rate: at ten tokens a second there is one for each, and nobody wants to read of ten changes."""
_LOSSES = 32
"""Connections that may be lost without a verified token in between: a bad link loses many."""


def not_passed_on(names: str) -> str:
    """Returns why these settings, penalties or biases, are of no use where an engine of others
    stands behind. It counts penalties over what it writes in one request, and an answer may need
    several; and the tokens of a bias are those of the device, which need not be the engine's."""
    are = "are" if " " in names else "is"
    return (
        f"{names} {are} not passed on to an upstream: where an answer goes on behind a cut it would"
        " count penalties anew, and a bias names this device's tokens, not its own"
    )


@dataclass
class Reachability:
    """The link to the verifier, for one turn."""

    linked: bool = True
    """Whether there is a verifier at all; without one the device writes at once."""
    retry: Retry = field(default_factory=lambda: Retry(0.1, 1.0))
    """The pauses between attempts."""
    link: Literal["down", "up", "refused"] = "down"
    away: str = ""
    """Why the engine behind the verifier does not answer, as the verifier says; empty if it does, or
    if there is none."""
    unanswered: str = ""
    """That this engine has answered nothing yet, in words; empty if it has."""
    not_now: str = ""
    """With which refusal for now the verifier answers, in words; empty once it works on the turn."""
    limited: str = ""
    """That this user's own rate is used up, in words, with the limit's name."""
    limited_until: float = float("-inf")
    """Until then that counts."""
    given_up: str = ""
    """Why the verifier is not asked again in this turn."""
    fails_for_now: bool = False
    """Whether that comes of failures in a row, and of no refusal: the next turn may go well."""
    setbacks: int = 0
    """Failed attempts in a row to repair the session."""
    _losses: int = 0
    """Lost connections in a row."""
    _why_down: str = ""
    """Why there is no connection, for the user."""

    @property
    def usable(self) -> bool:
        """Whether the connection is up and this turn may use it."""
        return self.link == "up" and not self.given_up

    @property
    def hopeless(self) -> bool:
        """Whether waiting for the verifier is useless in this turn."""
        return not self.linked or self.link == "refused" or bool(self.given_up)

    def give_up(self, why: str, *, for_now: bool) -> None:
        """Ask the verifier for nothing more in this turn; `for_now` says that it has not refused: it
        has failed too often in a row."""
        self.given_up = safe_line(why)
        self.fails_for_now = for_now

    def lost(self, why: str, *, refused: bool) -> bool:
        """Note that the connection is down; `refused` says that no new attempt is made before the
        next turn. Returns whether connections have been lost so often that this turn should ask no
        more."""
        was_up = self.link == "up"
        if was_up:
            self._losses += 1
        too_often = was_up and self._losses >= _LOSSES
        self.link = "refused" if refused else "down"
        self._why_down = safe_line(why)
        return too_often

    def setback(self) -> bool:
        """Count an attempt to repair the session; returns whether there were too many."""
        self.setbacks += 1
        return self.setbacks >= _SETBACKS

    def refused_for_now(self, error: Error) -> None:
        """Note why the verifier has no room for this turn now: it is no fault of the network, and
        may be a limit of this user's own. The limit's name is for whoever runs the verifier."""
        if error.code not in _NO_ROOM:
            return
        words = error.message
        if error.limit:
            words = f"the verifier refuses for now: {words} ({error.limit})"
        self.not_now = safe_line(words)

    def rate_is_used_up(self, now: float) -> None:
        """Note that this user's own rate is used up, and that the verifier is asked again when
        `retry` says."""
        self.limited_until = self.retry.not_before + _AFTER_SECONDS
        words = f"{RATE_USED_UP.format('the verifier')} ({RATE})"
        pause = self.retry.not_before - now
        # Shorter pauses are hardly seen: the text comes on, as fast as it may.
        self.limited = f"{words}: it goes on in {math.ceil(pause)} s" if pause >= 1 else words

    def as_limited(self, link: Link, now: float) -> Link:
        """Returns what the user is told in place of `link`: while his rate is used up, neither is
        the verifier late, nor is all well."""
        if link.state in ("online", "late") and now < self.limited_until:
            return Link(state="limited", detail=self.limited)
        return link

    def taken_up(self) -> None:
        """Note that the verifier has accepted what it was asked, or says that it works on it."""
        self.not_now = ""

    def progressed(self) -> None:
        """Count failures from zero, because verified tokens have come."""
        self.taken_up()
        self.retry.progressed()
        self.setbacks = 0
        self._losses = 0

    def try_again(self) -> None:
        """Forget the failures: the turn waits once more."""
        self.given_up = ""
        self.fails_for_now = False
        self.setbacks = 0
        self._losses = 0

    def news(self) -> Link:
        """What the user is to be told of the link while the device writes offline: its state, and
        the reason."""
        if not self.linked:
            return Link(state="none")
        if self.given_up:
            return Link(state="refused", detail=self.given_up, for_now=self.fails_for_now)
        if self.link == "up":
            # The verifier is connected; what writes the text may not be.
            if self.away:
                return Link(state="offline", detail=self.away)
            return Link(state="late", detail=self.unanswered or self.not_now)
        if self.link == "refused":
            return Link(state="refused", detail=self._why_down)
        if self._why_down:
            return Link(state="offline", detail=self._why_down)
        return Link(state="connecting")


class Failure(Enum):
    """Classes of failure, each with one reaction."""

    NOT_NOW = "refused for now"
    """Send the same again after a pause."""
    UNKNOWN = "never heard of"
    """The verifier does not have this session (any more): open it again with all its ids."""
    BROKEN = "broken"
    """The logs differ, or one end broke a rule: continue in a new session."""
    FOR_GOOD = "refused for good"
    """It will be refused again: the device continues offline in this turn."""


_CLASSES: dict[str, Failure] = {
    Code.BUSY: Failure.NOT_NOW,
    Code.DEADLINE: Failure.NOT_NOW,
    Code.DRAINING: Failure.NOT_NOW,
    Code.INTERNAL: Failure.NOT_NOW,
    Code.UNKNOWN_SESSION: Failure.UNKNOWN,
    Code.QUARANTINED: Failure.UNKNOWN,
    Code.CONFLICT: Failure.BROKEN,
}


def classify(error: Error) -> Failure:
    """The class of a refusal; an unknown code is final."""
    return _CLASSES.get(error.code, Failure.FOR_GOOD)
