from __future__ import annotations

import pytest

from moa.token_bucket import TokenBucket


def test_a_large_piece_goes_through_from_full_and_is_paid_for_afterwards() -> None:
    bucket = TokenBucket(10.0, 20.0, now=0.0)
    assert bucket.wait(500, 0.0) == 0
    bucket.spend(500)
    assert bucket.wait(1, 0.0) == pytest.approx(48.1)
    assert bucket.wait(20, 50.0) == 0


def test_the_average_is_kept() -> None:
    bucket = TokenBucket(10.0, 5.0, now=0.0)
    now = 0.0
    taken = 0
    while now < 100.0:
        taken += bucket.take(1, now)
        now += 0.01
    assert taken == pytest.approx(1005, abs=2)


def test_it_never_holds_more_than_a_burst_and_time_does_not_run_backwards() -> None:
    bucket = TokenBucket(10.0, 5.0, now=100.0)
    assert bucket.level(1e9) == 5.0
    bucket.spend(5)
    assert bucket.level(0.0) == 0.0
    assert not bucket.take(1, 1e9)
    unlimited = TokenBucket(0.0, 1.0, now=0.0)
    assert all(unlimited.take(1e9, 0.0) for _ in range(3))
