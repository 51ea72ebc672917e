"""What a grammar contributes to a draft: the text that must follow costs no drafter."""

from __future__ import annotations

from moa.grammar.matcher import TextMask
from moa.tree import DraftTree


def forced_draft(grammar: TextMask | None, pending: int, *, least: int, most: int) -> DraftTree | None:
    """A chain of what must follow, of `most` tokens; None where that is less than a drafter may win."""
    forced = grammar.forced()[:most] if grammar is not None else []
    if len(forced) < max(1, min(least, most)):
        return None
    return DraftTree([pending, *forced], list(range(-1, len(forced))), [0.0] * (1 + len(forced)))
