"""Which of the target's layers are read between: a rule, not a setting. No torch."""

from __future__ import annotations


def authors_taps(layers: int) -> tuple[int, ...]:
    """The low, middle and high layer, counted from 0, whose inputs a drafter reads: the rule of
    EAGLE-3's authors for a target of so many layers."""
    return 2, layers // 2, layers - 3
