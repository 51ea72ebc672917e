"""Token logs and texts: the common prefix of two."""

from __future__ import annotations

from typing import TypeVar

_Run = TypeVar("_Run", list[int], str)


def common_prefix(a: _Run, b: _Run) -> int:
    """Length of the common prefix, by bisection over slice comparisons, which run at C speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
