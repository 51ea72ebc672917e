from __future__ import annotations

import math
import random

import pytest

from tests.torture.soak import slope, slopes


def test_a_line_is_found_through_noise() -> None:
    rng = random.Random(0)
    seconds = [float(n) for n in range(600)]
    grows = slope(seconds, [100 + 0.01 * s + rng.gauss(0, 1) for s in seconds])
    assert grows.an_hour == pytest.approx(36, abs=3 * grows.error)
    assert not grows.flat
    assert slope(seconds, [100 + rng.gauss(0, 1) for _ in seconds]).flat


def test_what_wanders_is_not_taken_for_a_trend() -> None:
    wrong = 0
    for seed in range(100):
        rng = random.Random(seed)
        value = 100.0
        values = []
        for _ in range(600):
            value += 0.05 * (100 - value) + rng.gauss(
                0, 1
            )  # each sample is mostly like the one before
            values.append(value)
        wrong += not slope([float(n) for n in range(600)], values).flat
    assert wrong < 15  # 11; if each sample counted in full, 79


def test_what_grows_in_steps_is_a_trend() -> None:
    seconds = [float(n) for n in range(600)]
    assert not slope(seconds, [100 + n // 50 for n in range(600)]).flat


def test_a_sample_without_an_answer_says_nothing_of_latency() -> None:
    rounds = [math.nan if second % 10 == 3 else 8.0 + second for second in range(100)]
    found = slopes(
        [{"second": second, "megabytes": 9.0, "p50_ms": p50} for second, p50 in enumerate(rounds)]
    )
    assert found["p50_ms"].an_hour == pytest.approx(3600)
    assert found["megabytes"].an_hour == 0
