"""What a drafter is worth, in a user's words: tokens a round, and whether that pays."""

from __future__ import annotations

from collections.abc import Sequence

PAYS = 1.5
"""Tokens a round below which a draft costs about as much as it wins: a round also pays for drafting
and the link."""
_DEPTH = 6
"""Levels of the chain that is judged."""
_ENOUGH_TEXT = 10_000
"""Tokens learnt below which a drafter may know them by heart."""


def reached_at(right: float, later: float | None = None) -> list[float]:
    """Chances that a chain gets so far, if its first draft is right with the chance `right`, and
    each of the `later` ones with another, given those before it; without one, with the same."""
    if later is None:
        later = right
    return [right * later**level for level in range(_DEPTH)]


def worth(reached: Sequence[float], learnt: int | None = None) -> str:
    """Say in one line what a drafter wins, with a warning if that does not pay: how many tokens a
    round of the target brings with its drafts, the target's own included, and the share of first
    drafts that are right.

    `reached` holds, for each place of the chain, the probability that all drafts up to it are
    right. `learnt` is given while a drafter is trained: these figures are then of its training text,
    which has so many tokens, and say little if it is short.
    """
    tokens = 1 + sum(reached)
    right = reached[0] if reached else 0.0
    line = f"about {tokens:.1f} tokens a round, {right:.0%} of drafts right"
    if learnt is not None:
        line += " in the text of the last steps"
    if tokens < PAYS:
        line += (
            f"; WARNING: below {PAYS} drafts cost more than they win: train longer (--steps), on more text,"
            " or on the target's own answers (--generate)"
        )
    elif learnt is not None and learnt < _ENOUGH_TEXT:
        line += f"; WARNING: it may know these {learnt:,} tokens by heart: moa-export build --calibration tells more"
    return line
