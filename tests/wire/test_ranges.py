from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moa.wire import Ranges

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(RANGE, max_size=12), st.integers(0, 40))
def test_it_is_a_set_of_rows(ranges: list[tuple[int, int]], length: int) -> None:
    rows = Ranges(ranges)
    expected = {row for start, stop in ranges for row in range(start, stop)}
    assert {row for row in range(50) if row in rows} == expected
    assert len(rows) == len(expected)
    pieces = list(rows)
    assert pieces == sorted(pieces)
    assert all(a[1] < b[0] for a, b in pairwise(pieces)), "touching ranges are joined"
    rows.truncate(length)
    assert {row for row in range(50) if row in rows} == {row for row in expected if row < length}


@given(st.lists(RANGE, max_size=8), st.integers(0, 45), st.integers(1, 10), st.integers(0, 20))
def test_missing_rows_come_newest_first_and_all_of_them(
    ranges: list[tuple[int, int]], length: int, most: int, floor: int
) -> None:
    rows = Ranges(ranges)
    sent = []
    while (run := rows.newest_missing(length, most, floor)) is not None:
        start, stop = run
        assert 0 < stop - start <= most
        assert all(row not in rows for row in range(start, stop))
        sent.append(run)
        rows.add(start, stop)
    assert all(a[0] >= b[1] for a, b in pairwise(sent))
    assert all(row in rows for row in range(floor, length))


def test_equality() -> None:
    assert Ranges([(0, 2), (2, 4)]) == Ranges([(0, 4)])
    assert Ranges() != Ranges([(0, 1)])
