"""Means and errors of comparisons prompt by prompt."""

from __future__ import annotations

import math

import pytest

from benchmarks.kit.paired import Estimate, speed, times

KINDS = ["exercises", "code", "exercises", "code"]


def test_speeds_are_geometric_means_over_prompts() -> None:
    run = {"tokens": [10, 10, 40, 40], "seconds": [[1.0], [10.0], [1.0], [10.0]]}
    found = speed(run, KINDS)
    assert found.value == pytest.approx(math.sqrt(math.sqrt(10 * 1 * 40 * 4)))
    assert speed(run, KINDS, {"exercises"}).value == pytest.approx(20)
    assert speed(run, KINDS, {"code"}).value == pytest.approx(2)


def test_kinds_far_apart_are_no_error() -> None:
    same = {"tokens": [10] * 4, "seconds": [[1.0], [10.0]] * 2}
    assert speed(same, KINDS).error == 0
    assert speed(same, ["code"] * 4).error > 1


def test_ways_are_compared_on_the_same_prompt_and_pass() -> None:
    slow = {"seconds": [[2.0, 20.0, 2.0], [6.0, 6.0, 6.0], [2.0] * 3, [6.0] * 3]}
    fast = {"seconds": [[1.0, 10.0, 1.0], [3.0, 3.0, 3.0], [1.0] * 3, [3.0] * 3]}
    assert times(fast, slow, KINDS) == Estimate(pytest.approx(2.0), pytest.approx(0.0, abs=1e-9))
    few = {"seconds": slow["seconds"][:1]}
    alone = times(few, fast, KINDS)
    assert alone.value == pytest.approx(0.5)
    assert math.isnan(alone.error)
    assert (f"{alone:.1f}", f"{Estimate(1.25, 0.5):.1f}") == ("0.5", "1.2 ± 0.5")
    assert (alone.up_to, Estimate(1.25, 0.5).up_to) == (alone.value, 1.75)
