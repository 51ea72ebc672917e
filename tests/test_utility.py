from __future__ import annotations

import random

import pytest

from moa.utility import AcceptanceTracker, Costs, Utility


def decode(
    right: float, *, level: float, tokens: int = 4000, costs: Costs | None = None, reading: float = 0.0,
    text: int = 10**9, deepest: int = 8, noise: float = 0.06,
) -> float:  # fmt: skip
    """Tokens a second beside plain decoding's, of texts whose levels are accepted with this chance. A plain
    round takes a second; `reading` is what a token that the drafter had no part in costs it, the prompt's 100 too."""
    rng, costs = random.Random(0), costs or Costs()
    spent, won = 0.0, 0
    while won < tokens:
        utility, missed, begun = Utility(costs, deepest), 100, won
        while won < tokens and won - begun < text:
            levels = utility.levels(missed)
            if levels:
                spent += missed * reading
                costs.read(missed * reading, missed) if missed else None
                missed = 0
            accepted = 0
            while accepted < levels and rng.random() < right:
                accepted += 1
            # Of mean 1, with a long tail as on a machine that does other things too.
            seconds = (1.0 + levels * level) * rng.lognormvariate(-(noise**2) / 2, noise)
            costs.add(seconds, levels, accepted + 1)
            utility.record(levels, accepted)
            spent += seconds
            won += accepted + 1
            missed += 0 if levels else 1
    return won / spent


@pytest.mark.parametrize("right", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("level", [0.3, 0.6])
def test_it_is_never_slower_than_plain_decoding(right: float, level: float) -> None:
    costs = Costs()
    decode(0.5, level=level, costs=costs, tokens=200)
    assert decode(right, level=level, costs=costs) > 0.98


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("level", [0.05, 0.1, 0.65])
@pytest.mark.parametrize("text", [40, 150])
def test_a_drafter_that_has_to_read_first_makes_nothing_slower(right: float, level: float, text: int) -> None:
    """A prompt is read in the time of three plain rounds; beside a small target a level costs two thirds of one."""
    costs = Costs()
    decode(right, level=level, costs=costs, tokens=200, reading=0.03, text=text)
    assert decode(right, level=level, costs=costs, tokens=2500, reading=0.03, text=text) > 0.98


@pytest.mark.parametrize("right", [0.0, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_noisy_machine_does_not_make_drafting_look_good_for_long(right: float, level: float) -> None:
    costs = Costs()
    decode(right, level=level, costs=costs, tokens=600, noise=0.7)
    assert decode(right, level=level, costs=costs, tokens=6000, noise=0.7) > 0.96


def test_reading_is_worth_it_where_drafts_hit() -> None:
    assert decode(0.95, level=0.1, reading=0.03, text=150) > 2.5


def test_where_drafts_hit_it_drafts_far() -> None:
    assert decode(0.95, level=0.1) > 3.0
    assert decode(0.6, level=0.1) > 1.5


def test_a_text_that_becomes_easy_is_drafted_for_again() -> None:
    costs = Costs()
    utility = Utility(costs, 8)
    for _ in range(400):
        levels = utility.levels()
        costs.add(1.0 + 0.4 * levels, levels, 1)
        utility.record(levels, 0)
    assert utility.levels() <= 2
    rounds = 0
    while utility.levels() < 4:
        levels, rounds = utility.levels(), rounds + 1
        costs.add(1.0 + 0.1 * levels, levels, levels + 1)
        utility.record(levels, levels)
        assert rounds < 2000


def test_a_new_text_expects_what_the_others_had_but_learns_soon() -> None:
    usual = AcceptanceTracker()
    for _ in range(200):
        usual.add(0, 4)
    fresh = AcceptanceTracker(usual)
    assert fresh.chance(0) < 0.45
    for _ in range(12):
        fresh.add(4, 4)
    assert fresh.chance(0) > 0.7


def test_one_slow_round_changes_nothing() -> None:
    costs = Costs()
    for _ in range(20):
        costs.add(1.0, 0, 1)
        costs.add(1.4, 4, 1)
    costs.add(500.0, 4, 1)
    costs.add(500.0, 0, 1)
    assert costs.seconds(0) == 1.0
    assert costs.seconds(4) == pytest.approx(1.4)


def test_seconds_lie_on_a_line_between_the_depths_that_were_measured() -> None:
    costs = Costs()
    for levels, seconds in ((0, 1.0), (2, 1.6), (6, 2.0)):
        costs.add(seconds, levels, 1)
    assert [costs.seconds(n) for n in (0, 1, 2, 4, 8)] == pytest.approx([1.0, 1.3, 1.6, 1.8, 2.2])


def test_the_first_rounds_are_plain_and_the_next_drafts() -> None:
    utility = Utility(Costs(), 6)
    for _ in range(2):
        assert utility.levels() == 0
        utility.costs.add(1.0, 0, 1)
        utility.record(0, 0)
    assert utility.levels() == 6


def test_what_drafting_has_to_beat_is_measured_again() -> None:
    """A slow start must not make drafting look good for ever."""
    costs = Costs()
    costs.add(9.0, 0, 1)
    costs.add(9.0, 0, 1)
    utility, plain = Utility(costs, 4), 0
    for _ in range(400):
        levels = utility.levels()
        plain += levels == 0
        costs.add(1.0 + 0.5 * levels, levels, 1)
        utility.record(levels, 0)
    assert plain > 280


def test_a_draft_that_costs_nothing_must_promise_what_ours_win_in_the_same_time() -> None:
    costs = Costs()
    utility = Utility(costs, 4)
    assert utility.matching() == 1.0, "before anything is known"
    for _ in range(20):
        costs.add(0.1, 0, 1.0)
        costs.add(0.125, 4, 5.0)
        utility.record(4, 4)
    assert 2.8 < utility.matching() < 3.0, "5 tokens in 125 ms are 4 in 100"
    for _ in range(40):
        utility.record(4, 0)
    assert utility.matching() < 0.2
