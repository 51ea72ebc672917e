"""The predicted time of a forward, learned from past ones."""

from __future__ import annotations

import random

import pytest

from cloud_verifier.forward_time import ForwardTime
from cloud_verifier.guesses import Guesses
from moa.wire.messages import Foresee


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


def test_the_fuller_a_batch_the_likelier_a_guess_must_be_to_go_along() -> None:
    """So guesses yield first under load: alone almost any of them pays, beside many rows only the likely ones."""
    forward_time = learned(0.020, 0.0005)
    worth = [forward_time.worth(rows) for rows in (1, 8, 32, 64)]
    assert worth == sorted(worth)
    assert worth[0] < 0.05
    assert worth[-1] == 0.5
    held = Guesses(waits=False)
    tokens, parents = list(range(10, 21)), list(range(-1, 10))
    held.add(Foresee(b"s" * 16, 1, 0, tokens, parents, [0, *[2] * 10]))  # each 0.78 as likely as the one before
    taken = [len(held.pick([10], 62, least).tokens) - 1 for least in worth]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] == 10
    assert 0 < taken[-1] < 4
