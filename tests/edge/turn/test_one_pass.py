"""A draft in one pass where it promises clearly more tokens a second than steps, and nowhere else."""

from __future__ import annotations

import pytest

from edge_client.turn.one_pass import level_rates, one_pass_wins

STEADY = [0.7] * 6


@pytest.mark.parametrize(("step", "whole", "wins"), [(0.01, 0.03, True), (0.001, 0.03, False), (0.01, 0.15, False)])
def test_a_pass_must_be_cheaper_than_the_steps_that_it_saves(step: float, whole: float, wins: bool) -> None:
    assert one_pass_wins(STEADY, STEADY, step=step, whole=whole) is wins


def test_fewer_tokens_can_cost_more_than_the_time_that_is_won() -> None:
    """The measured pair (docs/log, one pass): 16 steps of 0.54 ms win 4.12 tokens, a pass of 4.07 ms 2.44."""
    steps, one_pass = [0.78] * 6, [0.62] * 6 + [0.3] * 10
    assert not one_pass_wins(steps, one_pass, step=0.00054, whole=0.00407)
    assert one_pass_wins(steps, steps, step=0.0054, whole=0.00407), "as many tokens by slower steps: it would win"


def test_steps_are_counted_deeper_than_they_were_measured_and_a_block_is_not() -> None:
    """With free steps of certain tokens a chain is 16 levels deep; a pass has the levels that it was measured at."""
    assert not one_pass_wins([1.0], [1.0] * 8, step=1e-6, whole=1e-6)
    assert one_pass_wins([0.0], [1.0] * 8, step=1e-6, whole=1e-6)


def test_a_small_gain_is_none() -> None:
    """The best of the steps is one level: 1 + 0.5 tokens in a verification of 30 ms and a step of 30."""
    steps = [0.5, 0.0]
    assert not one_pass_wins(steps, [0.5, 0.0], step=0.03, whole=0.027)  # 1.05 times as many tokens a second
    assert one_pass_wins(steps, [0.5, 0.0], step=0.03, whole=0.02)


def test_rates_are_by_level_given_the_level_before() -> None:
    assert level_rates((0.8, 0.4, 0.0, 0.0)) == [0.8, 0.5, 0.0, 0.0]
    assert level_rates(()) == []
