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
        """Add rows start..stop, and join adjacent ranges."""
        if start >= stop:
            return
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
        """Drop rows from `length` on."""
        kept = [(start, min(stop, length)) for start, stop in self if start < length]
        self._starts = [s for s, _ in kept]
        self._stops = [s for _, s in kept]

    def newest_missing(self, length: int, most: int, floor: int = 0) -> tuple[int, int] | None:
        """The newest run of at most `most` rows in floor..length that are not held; None when all
        are."""
        stop = length
        at = bisect_left(self._starts, length) - 1
        if (
            at >= 0 and self._stops[at] >= stop
        ):  # ranges never touch, so below a range there is always a gap
            stop = self._starts[at]
            at = at - 1
        if stop <= floor:
            return None
        return max(self._stops[at] if at >= 0 else 0, stop - most, floor), stop

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
        at = bisect_right(self._starts, row) - 1
        return at >= 0 and row < self._stops[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"
