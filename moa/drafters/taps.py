"""Which of the target's layers are read between: a rule, not a setting. No torch."""

from __future__ import annotations


def authors_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high, by the rule of EAGLE-3's authors: layers whose inputs are read."""
    return 2, layers // 2, layers - 3
