"""What a refusal of the verifier means for a turn. Pure."""

from __future__ import annotations

from enum import Enum

from moa.wire import Code
from moa.wire.messages import Error


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


_CLASSES = {
    Code.BUSY: Failure.NOT_NOW,
    Code.DEADLINE: Failure.NOT_NOW,
    Code.DRAINING: Failure.NOT_NOW,
    Code.INTERNAL: Failure.NOT_NOW,
    Code.CANCELLED: Failure.NOT_NOW,  # as a turn does when its drafter has failed
    Code.UNKNOWN_SESSION: Failure.UNKNOWN,
    Code.QUARANTINED: Failure.UNKNOWN,
    Code.CONFLICT: Failure.BROKEN,
}


def classify(error: Error) -> Failure:
    """The class of a refusal; an unknown code is final."""
    return _CLASSES.get(Code(error.code), Failure.FOR_GOOD) if error.code in set(Code) else Failure.FOR_GOOD
