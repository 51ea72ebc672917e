from __future__ import annotations

import pytest

from cloud_verifier.sessions.budgets import BYTES, FRAMES, REFUSALS, Meter, Principal, WorkBudget
from moa.token_bucket import TokenBucket
from moa.wire import Limits

LIMITS = Limits(
    max_empty_frames_per_second=100,
    max_bytes_per_second=10_000,
    max_refusals_per_second=5,
    burst_seconds=2,
    flood_seconds=4,
)


def run(
    meter: Meter, per_second: float, seconds: float, name: str = FRAMES, piece: int = 50
) -> tuple[int, float, str]:
    """A client that sends so many a second, in pieces: how many are accepted, when it is closed,
    and by which limit."""
    now = 0.0
    done = 0
    wanted = 0.0
    while now < seconds:
        if (wait := meter.wait(now)) > 0:
            if limit := meter.held_back(wait, now):
                return done, now, limit
        elif wanted >= piece:
            meter.spend(name, piece)
            wanted = wanted - piece
            done = done + piece
            wait = 0.0
        now = now + (step := max(wait, 0.001))
        wanted = wanted + step * per_second
    return done, now, ""


@pytest.mark.parametrize(("name", "rate"), [(FRAMES, 100), (BYTES, 10_000), (REFUSALS, 5)])
def test_within_its_budget_nobody_waits(name: str, rate: int) -> None:
    done, _, limit = run(Meter(LIMITS, 0.0), 0.95 * rate, 60.0, name, piece=max(1, rate // 10))
    assert (done, limit) == (pytest.approx(57 * rate, rel=0.02), "")


def test_a_flood_gets_its_budget_and_no_more_and_is_cut_by_the_name_of_the_limit() -> None:
    done, at, limit = run(Meter(LIMITS, 0.0), 5000, 60.0)
    assert limit == FRAMES
    assert 3.0 < at < 8.0
    assert done <= 200 + 100 * at + 50


def test_bursts_are_welcome_or_slowed_down_and_not_cut() -> None:
    meter = Meter(LIMITS, 0.0)
    now = 0.0
    for _ in range(100):
        assert meter.wait(now) == 0
        for free in (True, True, False, False, False):
            meter.spend(FRAMES, 100)
            wait = meter.wait(now)
            assert (wait == 0) == free
            assert meter.held_back(wait, now) == ""
            now += wait
        now += 4.0


def test_connections_of_a_principal_share_its_budget_and_none_is_cut_for_the_others() -> None:
    principal = Principal(WorkBudget(LIMITS, 0.0, times=2), TokenBucket(0, 1, 0.0))
    flooder = Meter(LIMITS, 0.0)
    honest = Meter(LIMITS, 0.0)
    flooder.belongs_to(principal)
    honest.belongs_to(principal)
    for _ in range(5):
        flooder.spend(FRAMES, 100)
    assert honest.wait(0.0) > 0
    assert all(honest.held_back(0.25, 0.25 * step) == "" for step in range(100))
    assert Meter(LIMITS, 0.0).wait(0.0) == 0, "another principal does not wait"
