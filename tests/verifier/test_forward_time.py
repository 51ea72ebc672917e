"""The predicted time of a forward, learned from past ones."""

from __future__ import annotations

import random

import pytest

from cloud_verifier.engine.forward_time import ForwardTime, looks
from cloud_verifier.engine.guesses import Guesses
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


def test_what_a_token_looks_at_has_its_own_price() -> None:
    """Pieces of a prompt among short drafts: at its end one that fits is a fraction of one at its beginning."""
    forward_time, rng = ForwardTime(), random.Random(0)
    for n in range(300):
        size, context = (8, 100) if n % 2 else (rng.randrange(4, 64), 20 * n)
        looked = looks([(size, context)])
        forward_time.observe(size, 0.005 + 0.0003 * size + 1e-7 * looked, looked)
    assert forward_time.seconds(16, looks([(16, 6000)])) == pytest.approx(0.0266, rel=0.05)
    begin, end = forward_time.fitting(0.02, 0, 256), forward_time.fitting(0.02, 6000, 256)
    assert (begin, end) == (pytest.approx(66, abs=3), pytest.approx(14, abs=2))
    assert forward_time.added(end, 6000) <= 0.02
    assert forward_time.fitting(0.001, 6000, 256) == 0


def test_a_forward_takes_some_time_whatever_was_measured() -> None:
    rng = random.Random(1)
    for _ in range(50):
        forward_time = ForwardTime()
        for _ in range(60):
            size, context = rng.choice([1, 4, 8, 200]), rng.choice([0, 10, 8000])
            forward_time.observe(size, rng.expovariate(50), looks([(size, context)]))
            assert forward_time.seconds(1) > 0
            assert forward_time.seconds(64, looks([(64, 8000)])) > 0
            assert 0 <= forward_time.worth(4) <= 0.5


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
