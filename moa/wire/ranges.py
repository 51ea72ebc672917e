"""A set of rows as sorted, disjoint ranges: which activation records an end holds, and which are missing."""

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
        """Put in rows start..stop, joining what touches."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def truncate(self, length: int) -> None:
        """Drop rows from `length` on."""
        kept = [(start, min(stop, length)) for start, stop in self if start < length]
        self._starts, self._stops = [s for s, _ in kept], [s for _, s in kept]

    def newest_missing(self, length: int, most: int, floor: int = 0) -> tuple[int, int] | None:
        """The newest run of at most `most` rows in floor..length that are not held; None when all are."""
        stop = length
        for start, end in reversed(list(self)):
            if end >= stop:
                stop = min(stop, start)
                continue
            return (max(end, stop - most, floor), stop) if stop > max(end, floor) else None
        return (max(floor, stop - most), stop) if stop > floor else None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

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
