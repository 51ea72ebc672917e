from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cloud_verifier.sessions.budgets import BYTES, FRAMES, REFUSALS, Meter, Principal
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
    principal = Principal.of(replace(LIMITS, connection_budgets_per_principal=2), 0.0)
    flooder = Meter(LIMITS, 0.0)
    honest = Meter(LIMITS, 0.0)
    flooder.belongs_to(principal)
    honest.belongs_to(principal)
    for _ in range(5):
        flooder.spend(FRAMES, 100)
    assert honest.wait(0.0) > 0
    assert all(honest.held_back(0.25, 0.25 * step) == "" for step in range(100))
    assert Meter(LIMITS, 0.0).wait(0.0) == 0, "another principal does not wait"


def test_wrong_guesses_cost_no_text_and_are_run_as_often_again() -> None:
    limits = replace(LIMITS, max_tokens_per_second=10.0, max_burst_tokens=20)
    principal = Principal.of(limits, 0.0)
    principal.ran(tokens=3, guesses=8)  # two right, and six wrong
    assert (principal.tokens.level(0.0), principal.most_guesses(0.0)) == (17.0, 14.0)
    principal.ran(tokens=1, guesses=30)
    assert principal.tokens.level(0.0) == 16.0
    assert principal.most_guesses(0.0) == 0.0, "no more of them for now"
    assert principal.most_guesses(1.8) == 2.0, "they come back by the same rate"
    principal.ran(tokens=5, guesses=4)
    assert principal.most_guesses(1.8) == 2.0, "right ones are text"
    level = principal.tokens.level(1.8)
    principal.ran(tokens=0, guesses=0)
    assert principal.tokens.level(1.8) == level, "the end of a stream costs nothing"


def test_without_a_limit_all_guesses_are_run() -> None:
    principal = Principal.of(LIMITS, 0.0)
    principal.ran(tokens=1, guesses=10**9)
    assert principal.most_guesses(0.0) == math.inf
