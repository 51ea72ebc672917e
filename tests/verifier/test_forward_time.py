"""The predicted time of a forward, learned from past ones."""

from __future__ import annotations

import random

import pytest

from cloud_verifier.forward_time import ForwardTime


def learned(fixed: float, each: float, noise: float = 0.0) -> ForwardTime:
    forward_time, rng = ForwardTime(), random.Random(0)
    for _ in range(400):
        tokens = rng.randrange(1, 300)
        forward_time.observe(tokens, (fixed + each * tokens) * (1 + noise * rng.uniform(-1, 1)))
    return forward_time


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_learns_what_a_forward_and_a_token_take(noise: float) -> None:
    forward_time = learned(0.004, 0.0003, noise)
    assert forward_time.each == pytest.approx(0.0003, rel=0.1)
    assert forward_time.seconds(100) == pytest.approx(0.034, rel=0.1)


def test_a_machine_that_grows_slower_is_noticed() -> None:
    forward_time = learned(0.004, 0.0003)
    for tokens in range(1, 250):
        forward_time.observe(tokens, 0.04 + 0.003 * tokens)
    assert forward_time.seconds(100) == pytest.approx(0.34, rel=0.1)


def test_tokens_beside_others_take_their_share_at_most() -> None:
    forward_time = learned(0.010, 0.0001)
    more = forward_time.beside(100, 0.25, 1000)
    assert forward_time.seconds(100 + more) <= 1.25 * forward_time.seconds(100) < forward_time.seconds(100 + more + 2)
    assert forward_time.beside(100, 0.25, 7) == 7


def test_where_tokens_cost_nothing_as_many_go_along_as_may() -> None:
    forward_time = ForwardTime()
    for tokens in range(1, 400):
        forward_time.observe(tokens % 64 + 1, 0.05)
    assert forward_time.beside(8, 0.25, 256) == 256


def test_before_anything_has_run_it_knows_something() -> None:
    assert 0 < ForwardTime().seconds(1) < ForwardTime().seconds(256) < 1
