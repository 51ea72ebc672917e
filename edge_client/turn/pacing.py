"""How long a turn waits for what, by what it has measured: a target of 250 ms a forward is not late
when one of 3 ms would be. Pure; times are in seconds.

The browser has the same rules in `edge_client/web/turn/pacing.js`, with these numbers.
"""

from __future__ import annotations

from typing import NamedTuple

OFFLINE_AFTER = 1.0
"""Least wait beyond the usual before the device writes: shorter pauses are common on good links, too,
and the text that bridges them would be withdrawn."""
RTT_TIMES = 4.0
"""Round trips of the link that a lost connection may take to come back: TCP's and TLS's hellos, the
session's, and one for a loss."""
ANSWER_TIMES = 4.0
"""Usual times of an answer that one may take longer before it is late: a forward waits in a queue, or
shares the processor."""
LONGEST = 5.0
"""Wait beyond the usual that nobody is asked for because his target is slow."""
LATE_PACE = 0.05
"""Least time between tokens that the device writes while an answer is only late."""
PACE_SHARE = 5.0
"""Tokens that the device writes meanwhile in the usual time of an answer: as many as a forward over
good drafts brings. More would be withdrawn."""
STALLED = 10.0
"""Least time for which the word of the verifier counts that it works on the answer without coming
further: longer than the largest piece of a prompt takes on a CPU."""

SLOW_READING = 0.05
"""Seconds for which a slow engine, on a few cores, reads a token of a prompt."""
FIRST_TIMES = 2.0
"""Waits for an engine's first text, by the longest of late, that a device whose text stays waits for
the next one."""


class Waits(NamedTuple):
    """The waiting times of this moment."""

    offline: float
    """From the loss of the connection until the device writes."""
    late: float
    """Beyond the usual time of an answer on a live connection, until the device writes."""
    pace: float
    """Between two tokens that it writes then."""
    settle: float
    """For the check of a complete answer without any sign of it, on a live connection."""
    settle_away: float
    """The same while there is no connection: then the target's speed has no part in it."""
    stalled: float
    """Without progress of a verifier that says it works."""


def waits(
    rtt: float,
    answer: float,
    *,
    offline_after: float = OFFLINE_AFTER,
    pace: float = LATE_PACE,
    settle: float = 0.0,
) -> Waits:
    """How long a turn waits for what, in seconds, given the link's round trip and the usual time of
    an answer. What the user has set is the least; a wait that he has set to 0 stays 0."""
    return Waits(
        offline=_at_least(offline_after, RTT_TIMES * rtt),
        late=_at_least(offline_after, ANSWER_TIMES * answer),
        pace=max(pace, answer / PACE_SHARE),
        settle=_at_least(settle, ANSWER_TIMES * answer),
        settle_away=_at_least(settle, RTT_TIMES * rtt),
        stalled=max(STALLED, ANSWER_TIMES * answer),
    )


def silent_reading(
    unread: int, *, stalled: float, first: float = 0.0, text_stays: bool = False
) -> float:
    """Seconds for which an engine behind the verifier may read so many tokens without a word of how
    far it is, and without a text of this device's in its place. `stalled` is the wait for a verifier
    that could tell, `first` the longest wait for a first text of late.

    Text that is corrected later costs little, and comes soon. Text that stays (`text_stays`) would be
    all that is ever seen of the answer, if it is complete before a slow engine begins.
    """
    reading = SLOW_READING * unread
    if text_stays:
        return max(stalled, reading, FIRST_TIMES * first)
    return min(stalled, reading)


def _at_least(floor: float, measured: float) -> float:
    """The measured wait, capped at `LONGEST` and raised to `floor`; a floor of 0 means no wait at
    all."""
    if not floor:
        return 0.0
    return max(floor, min(measured, LONGEST))
