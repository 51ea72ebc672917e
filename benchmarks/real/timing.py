"""Processor time, which other programs on the machine change little; with one thread it is the time on
a free core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

Work = Callable[[], object]


def milliseconds_in_turn(
    works: Mapping[str, Work], times: int, *, undo: Mapping[str, Work] | None = None
) -> dict[str, float]:
    """The median milliseconds of each work, of which all are done once before the next time. Before
    all is a time that does not count. What undoes a work, by the same name, is not timed."""
    undo = undo or {}
    found: dict[str, list[float]] = {name: [] for name in works}
    for attempt in range(times + 1):
        for name, work in works.items():
            before = time.process_time()
            work()
            seconds = time.process_time() - before
            if name in undo:
                undo[name]()
            if attempt:
                found[name].append(1000 * seconds)
    return {name: median(milliseconds) for name, milliseconds in found.items()}
