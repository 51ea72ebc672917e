"""The cost of a forward, learned from those that ran."""

from __future__ import annotations

import random

import pytest

from moa.speculation.cost import Cost, attention_pairs


def learned(fixed: float, each: float, noise: float = 0.0, samples: int = 600) -> Cost:
    """Forwards of all sizes to 300, slower than they must be by up to so much."""
    cost = Cost()
    rng = random.Random(0)
    for _ in range(samples):
        tokens = round(2 ** rng.uniform(0, 8.2))
        cost.observe(tokens, (fixed + each * tokens) * (1 + noise * rng.random()))
    return cost


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("size", [1, 5, 30, 100, 290])
def test_it_learns_what_a_forward_takes(noise: float, size: int) -> None:
    assert learned(0.004, 0.0003, noise).seconds(size) == pytest.approx(
        0.004 + 0.0003 * size, rel=0.02 + noise / 2
    )


def test_any_shape_of_curve_is_learned() -> None:
    """An accelerator reads its weights for 64 tokens as for one, and then pays for each."""
    cost = Cost()
    for number in range(400):
        size = (1, 8, 64, 128, 256)[number % 5]
        cost.observe(size, 0.01 * max(1.0, size / 64))
    assert [cost.seconds(size) for size in (1, 30, 64, 192)] == pytest.approx(
        [0.01, 0.01, 0.01, 0.03]
    )


def test_the_first_run_of_a_size_does_not_count_and_a_size_never_measured_is_cheap_so_that_it_is_tried() -> (
    None
):
    cost = Cost()
    cost.observe(4, 9.0)
    assert cost.seconds(4) == 0.0
    cost.observe(4, 1.0)
    assert cost.seconds(4) == 1.0
    assert 1.0 < cost.seconds(8) < 1.5
    for _ in range(99):
        cost.observe(8, 2.0)
    assert cost.seconds(8) == pytest.approx(2.0, rel=0.02)
    assert cost.seconds(12) == pytest.approx(3.0, rel=0.02)


def test_a_stalled_machine_changes_nothing_and_a_slower_one_is_noticed() -> None:
    cost = learned(0.004, 0.0)
    cost.observe(4, 500.0)
    assert cost.seconds(4) < 0.0043
    for _ in range(100):
        cost.observe(4, 0.04)
    assert cost.seconds(4) > 0.035
    for _ in range(15):
        cost.observe(4, 0.004)
    assert cost.seconds(4) < 0.0045


def test_no_size_is_dearer_than_a_larger_one() -> None:
    """What was measured while other work ran, and never again, must not forbid what is smaller; nor
    hold it down."""
    cost = Cost()
    for size, seconds in (*((1, 1.0), (2, 7.0)) * 3, *((1, 1.0), (8, 1.5)) * 20):
        cost.observe(size, seconds)
    assert [cost.seconds(size) for size in (1, 2, 8)] == pytest.approx([1.0, 1.5, 1.5], rel=0.02)
    for _ in range(150):
        cost.observe(1, 3.0)
    assert [cost.seconds(size) for size in (1, 2, 8)] == pytest.approx([3.0, 3.0, 3.0], rel=0.02)


def test_what_a_token_attends_to_has_its_own_price() -> None:
    """Pieces of a prompt among short drafts: at its end one that fits is a fraction of one at its
    beginning."""
    cost = Cost()
    rng = random.Random(0)
    for n in range(600):
        size, context = (8, 100) if n % 2 else (round(2 ** rng.uniform(2, 6)), 10 * n)
        pairs = attention_pairs([(size, context)])
        cost.observe(size, 0.005 + 0.0003 * size + 1e-7 * pairs, pairs)
    assert cost.seconds(16, attention_pairs([(16, 6000)])) == pytest.approx(0.0266, rel=0.1)
    begin = cost.fitting(0.02, 256)
    end = cost.fitting(0.02, 256, context=6000)
    assert begin == pytest.approx(66, abs=8)
    assert end == pytest.approx(14, abs=4)
    assert cost.added(end, 6000) <= 0.02 < cost.added(end + 1, 6000)


def test_tokens_beside_others_take_their_share_at_most() -> None:
    cost = learned(0.010, 0.0001)
    limit = 0.25 * cost.seconds(100)
    more = cost.fitting(limit, 1000, beside=100)
    assert cost.added(more, beside=100) <= limit < cost.added(more + 2, beside=100)
    assert cost.fitting(limit, 7, beside=100) == 7
    assert cost.fitting(-1.0, 7) == 0


def test_a_forward_takes_some_time_whatever_was_measured() -> None:
    rng = random.Random(1)
    for _ in range(20):
        cost = Cost(0.005)
        for _ in range(60):
            size = rng.choice([1, 4, 8, 200])
            context = rng.choice([0, 10, 8000])
            cost.observe(size, rng.expovariate(50), attention_pairs([(size, context)]))
            assert (
                cost.seconds(64, attention_pairs([(64, 8000)]))
                >= cost.seconds(64)
                >= cost.seconds(1)
                > 0
            )
        short = Cost()
        for context in range(400):  # short contexts put no price of noise on long ones
            short.observe(1, 0.004 * (1 + 0.1 * rng.random()), attention_pairs([(1, context)]))
        assert short.seconds(1, attention_pairs([(1, 100_000)])) < 0.005


def test_the_largest_size_is_one_that_was_measured() -> None:
    cost = Cost(prior=0.005)
    assert cost.largest == 0.0
    for size in (8, 8, 64, 64, 512):
        cost.observe(size, 0.01)
    assert cost.largest == 64.0, "the first forward of a size says nothing"
