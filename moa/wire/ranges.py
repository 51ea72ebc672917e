"""A set of rows as sorted, disjoint ranges: which activation records one end has, and which are
missing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """Rows held. Ranges are half-open: (start, stop)."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add rows start..stop. Ranges that overlap or touch them become one range with them."""
        if start >= stop:
            return
        # The ranges from `first` to before `last` overlap or touch the new one, and are replaced.
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def keep_newest(self, runs: int) -> None:
        """Forget all but the newest `runs` ranges."""
        del self._starts[:-runs], self._stops[:-runs]

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        count = bisect_left(self._starts, length)
        del self._starts[count:]
        del self._stops[count:]
        if count > 0:
            self._stops[-1] = min(self._stops[-1], length)

    def newest_missing(self, length: int, most: int, floor: int = 0) -> tuple[int, int] | None:
        """The newest run of rows within floor..length that are not in the set, as (start, stop); of
        a run of more than `most` rows the last ones. None if all are in the set."""
        stop = length
        below = bisect_left(self._starts, length) - 1  # the last range that begins before `length`
        if below >= 0 and self._stops[below] >= stop:
            # The newest rows are held. Ranges never touch, so there is a gap below this one.
            stop = self._starts[below]
            below -= 1
        if stop <= floor:
            return None
        gap_start = self._stops[below] if below >= 0 else 0
        return max(gap_start, stop - most, floor), stop

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __reversed__(self) -> Iterator[tuple[int, int]]:
        return zip(reversed(self._starts), reversed(self._stops), strict=True)

    @property
    def runs(self) -> int:
        """How many ranges there are."""
        return len(self._starts)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self)

    def __contains__(self, row: int) -> bool:
        index = bisect_right(self._starts, row) - 1
        return index >= 0 and row < self._stops[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"
