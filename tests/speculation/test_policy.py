"""Simulated worlds: what the policy gains where drafting pays, and loses where it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cloud_verifier.engine.draft import worth_by_share
from moa.speculation.cost import Cost
from moa.speculation.policy import Policy, least_chance
from moa.tree import TreeShape
from tests.speculation.worlds import MANY, PROMPT, Bursts, Dense, Mixture, World, beside_plain

SHORT = 50
COLD = 10.0
WORLDS: dict[str, tuple[World, float, int, float]] = {
    **{
        f"right in {right}, a level takes {level}, a token {token}": (
            World(level=level, token=token, before=[(right, 200)]),
            right,
            MANY,
            0.92,
        )
        for right in (0.0, 0.5, 0.85, 0.95)
        for level, token in ((0.02, 0.0), (0.1, 0.1), (0.3, 0.0), (1.0, 0.1))
    },
    "a dear drafter that seemed right": (World(level=0.3, before=[(0.5, 200)]), 0.2, MANY, 0.98),
    "short texts, only misses": (
        World(level=0.05, reading=0.03, before=[(0.0, 200)]),
        0.0,
        40,
        0.87,
    ),
    "texts, only misses": (World(level=0.65, reading=0.03, before=[(0.0, 200)]), 0.0, 150, 0.93),
    "reading takes longer than it saves": (World(reading=3.0, before=[(0.9, 100)]), 0.9, 100, 0.85),
    "a noisy machine": (World(level=1.0, noise=0.7, before=[(0.7, 600)]), 0.7, MANY, 0.96),
    "a noisy machine, dear drafts": (
        World(level=0.3, noise=0.7, before=[(0.0, 600)]),
        0.0,
        MANY,
        0.96,
    ),
    "slow first forwards": (
        World(level=0.05, token=0.25, cold={"forward": (12, 5.0)}, before=[(0.4, 300)]),
        0.4,
        SHORT,
        0.93,
    ),
    **{
        f"a cold {what}": (
            World(level=0.1, token=0.02, cold={what: (count, COLD)}, before=[(0.9, 500)]),
            0.9,
            SHORT,
            0.9,
        )
        for what, count in (("draft", 6), ("reading", 1), ("forward", 6))
    },
}
"""A world, how often a level is right, tokens of a text, and the least share of the best speed."""


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_near_the_best_depth_and_loses_little_where_none_pays(name: str) -> None:
    world, right, of_text, least = WORLDS[name]
    for earlier, tokens in world.before:
        world.speed(earlier, tokens, of_text=of_text)
    assert world.speed(right, 3000, of_text=of_text) > least * world.ideal(right, of_text)


def test_easy_texts_among_hard_ones_are_drafted_for_from_their_start() -> None:
    world = World(level=0.02, reading=0.005)
    for _ in range(5):
        world.speed(0.0, 100)
    assert world.speed(0.95, 60) > 2.5


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_it_recovers_when_the_machine_changes(factor: float) -> None:
    """A level of drafting was, or was not, worth its time; then it is the other way."""
    world = World(level=0.1 if factor > 1 else 1.0)
    world.speed(0.8, 1500)
    world.level *= factor
    world.speed(0.8, 4000)
    assert world.speed(0.8, 1500) > 0.93 * world.ideal(0.8, MANY)


def test_it_recovers_when_a_text_becomes_easy_or_hard() -> None:
    world = World(level=0.4)
    text = world.policy.text(0.0)

    def drafted(right: bool, rounds: int) -> float:
        """The share of these rounds that were drafted for."""
        world.depths.clear()
        for _ in range(rounds):
            (depth,) = depths = world.policy.plan([text], [0])
            world.run([text], depths, [depth if right else 0])
        return sum(map(bool, world.depths)) / rounds

    assert drafted(True, 100) > 0.8
    for _ in range(2):
        drafted(False, 50)
        assert drafted(False, 500) < 0.1, "retries back off"
        drafted(True, 600)
        assert drafted(True, 100) > 0.8


@pytest.mark.parametrize("token", [0.1, 1.0])
def test_a_full_batch_that_pays_for_every_token_does_not_draft(token: float) -> None:
    world = World(level=0.02)
    world.speed(0.8, 400)  # a single text learns that drafts are cheap
    world.texts = 48
    world.token = token
    world.reading = 0.01
    world.speed(0.8, 10_000)
    assert world.speed(0.8, 20_000) > 0.98


def test_a_full_batch_whose_tokens_are_free_drafts() -> None:
    """As on an accelerator, where a forward reads the weights for many tokens as for one."""
    world = World(level=0.0005, token=0.0005, texts=48)
    assert world.speed(0.8, 20_000) > 2.0


def test_among_many_texts_those_draft_whose_drafts_hit() -> None:
    world = World(level=0.01, token=0.01)
    texts = [world.policy.text(0.0) for _ in range(16)]
    drafted = []
    for _ in range(48):
        depths = world.policy.plan(texts, [0] * 16)
        world.run(texts, depths, [depth if place < 8 else 0 for place, depth in enumerate(depths)])
        drafted += [depths] if any(depths) else []  # a round that measures plain decoding has none
    assert all(drafted[-1][:8])
    assert not any(drafted[-1][8:])


def test_who_reads_one_text_beside_many_of_another_keeps_its_drafts() -> None:
    """They were switched off for all, so that it took eleven times the forwards."""
    world = World(level=0.01, token=1.0)
    worth = worth_by_share(["many"] * 30 + ["one"])
    assert sum(worth) == pytest.approx(31)
    drafted: dict[bool, list[list[int]]] = {}
    for fair in (False, True):
        texts = [world.policy.text(0.0) for _ in range(31)]
        for _ in range(200):
            depths = world.policy.plan(texts, [0] * 31, 0, worth if fair else ())
            world.run(texts, depths, [0] * 30 + [depths[-1]])
            drafted.setdefault(fair, []).append(depths)
    latest = {fair: rounds[-20:] for fair, rounds in drafted.items()}
    drafts = {fair: [depths[-1] > 2 for depths in rounds] for fair, rounds in latest.items()}
    assert sum(drafts[False]) < 3
    assert sum(drafts[True]) > 15
    assert sum(any(depths[:-1]) for depths in latest[True]) < 3
    assert world.policy.shape(8, worth[-1]).least < world.policy.shape(8).least


def test_reading_holds_the_others_of_a_batch_up_for_few_at_a_time() -> None:
    world = World(level=0.001, reading=0.01)
    world.speed(0.95, 200)
    texts = [world.policy.text(0.0) for _ in range(10)]
    readers = [
        sum(map(bool, world.policy.plan(texts, [missed] * 10))) for missed in (PROMPT, 10, 0)
    ]
    assert 1 == readers[0] < readers[1] < readers[2] == 10


@pytest.mark.parametrize(
    ("texts", "reading", "level", "least"),
    [(8, 0.001, 0.01, 3.2), (16, 0.0005, 0.01, 2.35), (24, 0.0004, 0.005, 2.65)],
)
def test_a_crowd_that_asks_at_once_hardly_waits_for_its_first_drafts(
    texts: int, reading: float, level: float, least: float
) -> None:
    """Each prompt is read in a twentieth of a round or a tenth, and an answer has 40 tokens: each
    round that a text waits for its drafter is a tenth of its rounds."""
    world = World(level=level, reading=reading, texts=texts)
    world.speed(0.9, 200 * texts, of_text=40)
    assert world.speed(0.9, 1200 * texts, of_text=40) > least


def test_it_drafts_for_nobody_before_plain_rounds_were_measured_nor_where_the_drafter_cannot() -> (
    None
):
    world = World()
    text = world.policy.text(0.0)
    assert world.policy.plan([text], [0]) == [0]
    assert world.policy.matching(text) == 0.0
    for _ in range(2):
        world.run([text], [0], [0])
    assert world.policy.plan([text], [0])[0] > 0
    assert world.policy.plan([text], [None]) == [0]
    assert world.policy.plan([], []) == []


def shape_of(token: float, level: float) -> TreeShape:
    """The shape where a node costs so much of a plain round, and a level so much."""
    policy = Policy(TreeShape(8, 16, 63, min_score=-9.0))
    world = World(level=level, token=token, policy=policy, noise=0.0)
    text = policy.text(0.0)
    for depth in (0, 0, 0, 1, 1, 1, 6, 6, 6, 60, 60, 60, 1, 6):
        world.run([text], [depth], [depth // 3])
    policy.plan([text], [0])
    return policy.shape(16)


def test_a_tree_is_as_wide_and_as_deep_as_its_nodes_and_levels_are_cheap() -> None:
    free = shape_of(1e-6, 1e-3)
    dear = shape_of(0.05, 1e-3)
    slow = shape_of(1e-6, 0.2)
    assert free.least < -7 < -4 < dear.least < 0, (
        "a node must promise what its part of the forward is worth"
    )
    assert free.min_score < -4 < -2 < slow.min_score < 0, (
        "a level's nodes what the drafter's time is worth"
    )
    assert shape_of(5.0, 5.0).least < 0, "never certainty"


def test_a_draft_that_costs_nothing_must_promise_what_ours_win_in_the_same_time() -> None:
    world = World(level=0.25 / 4, noise=0.0, policy=Policy(TreeShape.chain(4)))
    text = world.policy.text(0.0)
    for _ in range(40):
        world.run([text], world.policy.plan([text], [0]), [4])
    assert world.policy.matching(text) == pytest.approx(3, abs=0.5), "5 tokens in 1.25 s are 4 in 1"


def test_clients_with_many_temperatures_cost_no_memory() -> None:
    policy = Policy(TreeShape.chain(4))
    asked = [number / 77 for number in range(7700)]  # up to the highest that a request may have
    assert len({id(policy.text(one).accepted._prior) for one in asked}) <= 1001


def test_the_fuller_a_batch_the_likelier_a_guess_must_be_to_go_along() -> None:
    """So guesses yield first under load: alone almost any of them pays, beside many rows only the
    likely ones."""
    cost = Cost()
    for size in (1, 4, 16, 64, 256) * 30:
        cost.observe(size, 0.020 + 0.0005 * size)
    least = [least_chance(cost, rows) for rows in (1, 8, 32, 64)]
    assert least == sorted(least)
    assert least[0] < 0.05
    assert least[-1] == 0.5


@pytest.mark.parametrize(
    ("kind", "otherwise", "least"), [(Mixture, 0.65, 0.95), (Bursts, 0.94, 0.95), (Dense, 9.9, 4.0)]
)
def test_where_memory_holds_a_part_of_the_weights_no_single_fast_or_slow_forward_decides(
    kind: type[Mixture | Bursts | Dense], otherwise: float, least: float
) -> None:
    """`otherwise`: what is reached at most where one plain round behind drafts is the measure, and
    the fastest of like forwards are."""
    assert beside_plain(kind, varies=False) < otherwise
    assert beside_plain(kind, varies=True) > least


@pytest.mark.parametrize("right", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("answers", [(600,), (96,) * 3, (200,) * 8])
def test_trials_cost_at_most_a_twentieth_where_drafts_push_out_what_plain_rounds_need(
    answers: Sequence[int], right: float
) -> None:
    """With trials of any depth, and their own forward as their cost, it was 0.6 to 0.9."""
    ratio = beside_plain(Mixture, varies=True, right=right, answers=answers)
    assert ratio > 0.95
