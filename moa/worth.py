"""What a drafter is worth, in a user's words: tokens a round, and whether that pays."""

from __future__ import annotations

from collections.abc import Sequence

PAYS = 1.5
"""Tokens a round below which a draft costs about as much as it wins: a round also pays for drafting and the link."""
_DEPTH = 6


def reached_at(right: float) -> list[float]:
    """Chances that a chain gets so far, if each draft is right with the same chance, given those before it."""
    return [right**level for level in range(1, _DEPTH + 1)]


def worth(reached: Sequence[float]) -> str:
    """One line: tokens a round of a chain, the target's own included, and the share of first drafts that are right;
    with a warning if that does not pay."""
    tokens, right = 1 + sum(reached), reached[0] if reached else 0.0
    line = f"about {tokens:.1f} tokens a round, {right:.0%} of drafts right"
    if tokens < PAYS:
        line += (
            f"; WARNING: below {PAYS} drafts cost more than they win: train longer (--steps), on more text,"
            " or on the target's own answers (--generate)"
        )
    return line
