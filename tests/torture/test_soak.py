from __future__ import annotations

import random

import pytest

from tests.torture.soak import slope


def test_a_line_is_found_through_noise() -> None:
    rng = random.Random(0)
    seconds = [float(n) for n in range(600)]
    grows = slope(seconds, [100 + 0.01 * s + rng.gauss(0, 1) for s in seconds])
    assert grows.an_hour == pytest.approx(36, abs=3 * grows.error)
    assert not grows.flat
    assert slope(seconds, [100 + rng.gauss(0, 1) for _ in seconds]).flat
