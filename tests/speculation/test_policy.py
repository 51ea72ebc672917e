"""Simulated worlds: what the policy gains where drafting pays, and loses where it does not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from moa.speculation.cost import Cost
from moa.speculation.policy import Drafted, Policy, RoundTime, TextAcceptance, least_chance
from moa.tree import TreeShape

PROMPT = 100


@dataclass
class World:
    """A forward of one token takes a second, and `token` more for each further one; a level takes `level` for each text
    that drafts; reading a token takes `reading`. A level is accepted with the chance `right`."""

    level: float = 0.1
    token: float = 0.0
    reading: float = 0.0
    noise: float = 0.06
    """Of a long-tailed factor of mean 1, as on a machine that does other things too."""
    texts: int = 1
    policy: Policy = field(default_factory=lambda: Policy(TreeShape.chain(8)))
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    depths: list[int] = field(default_factory=list)
    """Deepest draft of each round."""
    cold: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How many of the first forwards, drafts and readings of a new process are slower, and by what factor."""

    def forward(self, tokens: float) -> float:
        return 1.0 + self.token * (tokens - 1)

    def speed(self, right: float, tokens: int, *, of_text: int = 10**9) -> float:
        """Tokens a second of texts of so many tokens, `texts` at a time, in units of plain decoding's."""
        spent, won = 0.0, 0
        while won < tokens:
            batch = [self.policy.text(0.0) for _ in range(self.texts)]
            missed, begun = [PROMPT] * self.texts, won
            while won < tokens and won - begun < of_text * self.texts:
                depths = self.policy.plan(batch, list(missed))
                for place, depth in enumerate(depths):
                    if depth and missed[place]:
                        spent += (seconds := missed[place] * self.reading * self._coldness("reading"))
                        self.policy.read(missed[place], seconds)
                    missed[place] = 0 if depth else missed[place] + 1
                accepted = [self._accepted(right, depth) for depth in depths]
                spent += self.run(batch, depths, accepted)
                won += self.texts + sum(accepted)
        return won / spent / self.texts * self.forward(self.texts)

    def run(self, batch: list[TextAcceptance], depths: list[int], accepted: list[int]) -> float:
        """A round; returns its seconds."""
        tokens, luck = len(batch) + sum(depths), self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        draft = luck * self.level * max(depths) * sum(map(bool, depths))
        draft *= self._coldness("draft") if draft else 1.0
        forward = luck * self.forward(tokens) * self._coldness("forward")
        drafts = [Drafted(text, d, d, d, right) for text, d, right in zip(batch, depths, accepted, strict=True) if d]
        self.policy.record(drafts, RoundTime(len(batch), tokens, forward, draft))
        self.depths.append(max(depths))
        return draft + forward

    def _coldness(self, what: str) -> float:
        left, factor = self.cold.get(what, (0, 1.0))
        self.cold[what] = left - 1, factor
        return factor if left > 0 else 1.0

    def _accepted(self, right: float, depth: int) -> int:
        return next((level for level in range(depth) if self.rng.random() >= right), depth)

    def ideal(self, right: float) -> float:
        """The best speed of one text at a fixed depth, 0 included."""
        speeds = [
            sum(right**n for n in range(depth + 1)) / (self.forward(1 + depth) + self.level * depth)
            for depth in range(9)
        ]
        return max(speeds)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("level", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("token", [0.0, 0.1])
def test_it_comes_near_the_best_depth(right: float, level: float, token: float) -> None:
    world = World(level=level, token=token)
    world.speed(right, 200)
    assert world.speed(right, 3000) > 0.92 * world.ideal(right)


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("level", [0.3, 0.6])
def test_where_drafting_does_not_pay_a_long_text_loses_one_part_in_fifty(right: float, level: float) -> None:
    world = World(level=level)
    world.speed(0.5, 200)
    assert world.speed(right, 3000) > 0.98


@pytest.mark.parametrize("level", [0.05, 0.65])
@pytest.mark.parametrize(("of_text", "least"), [(40, 0.87), (150, 0.93)])
def test_of_a_short_text_that_only_misses_the_reading_and_few_trials_are_lost(
    level: float, of_text: int, least: float
) -> None:
    """A prompt is read in the time of three plain rounds."""
    world = World(level=level, reading=0.03)
    world.speed(0.0, 200, of_text=of_text)
    assert world.speed(0.0, 2500, of_text=of_text) > least


def test_reading_that_takes_longer_than_drafts_can_save_is_not_begun() -> None:
    world = World(reading=3.0)
    assert world.speed(0.9, 100) < 0.5, "it was read once, to find out"
    world.depths.clear()
    assert world.speed(0.9, 400, of_text=100) > 0.99
    assert not any(world.depths)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_noisy_machine_does_not_make_drafting_look_good(right: float, level: float) -> None:
    world = World(level=level, noise=0.7)
    world.speed(right, 600)
    assert world.speed(right, 4000) > 0.96


def test_easy_texts_among_hard_ones_are_drafted_for_from_their_start() -> None:
    world = World(level=0.02, reading=0.005)
    for _ in range(5):
        world.speed(0.0, 100)
    assert world.speed(0.95, 60) > 2.5


@pytest.mark.parametrize("token", [0.1, 1.0])
@pytest.mark.parametrize("right", [0.3, 0.8])
def test_a_full_batch_that_pays_for_every_token_does_not_draft(right: float, token: float) -> None:
    world = World(level=0.02)
    assert world.speed(right, 400) > 0.98, "a single text learns that drafts are cheap"
    world.texts, world.token, world.reading = 48, token, 0.01
    world.speed(right, 10_000)
    world.depths.clear()
    assert world.speed(right, 20_000) > 0.98
    assert sum(map(bool, world.depths)) < 0.05 * len(world.depths)


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
    assert len(drafted) > 40
    assert all(drafted[-1][:8])
    assert not any(drafted[-1][8:])


def test_a_text_that_becomes_easy_is_drafted_for_again_and_one_that_becomes_hard_is_left() -> None:
    world = World(level=0.4)
    text = world.policy.text(0.0)

    def rounds_until(wanted: Callable[[int], bool], hit: bool) -> int:
        for number in range(2000):
            (depth,) = depths = world.policy.plan([text], [0])
            if wanted(depth):
                return number
            world.run([text], depths, [depth if hit else 0])
        raise AssertionError("never")

    assert rounds_until(lambda depth: depth >= 4, hit=True) < 20
    for _ in range(3):
        for _ in range(20):
            world.run([text], world.policy.plan([text], [0]), [0])
        world.depths.clear()
        for _ in range(500):
            world.run([text], world.policy.plan([text], [0]), [0])
        assert sum(map(bool, world.depths)) < 10, "retries back off"
        assert rounds_until(lambda depth: depth >= 4, hit=True) < 600


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_it_recovers_when_the_machine_changes(factor: float) -> None:
    """A level of drafting was, or was not, worth its time; then it is the other way."""
    world = World(level=0.1 if factor > 1 else 1.0)
    world.speed(0.8, 1500)
    world.level *= factor
    world.speed(0.8, 4000)
    assert world.speed(0.8, 1500) > 0.93 * world.ideal(0.8)


def test_what_drafting_has_to_beat_is_measured_again() -> None:
    """Plain decoding was slow when it was measured, and drafts seem to pay beside it."""
    world = World(level=0.5, noise=0.0)
    text = world.policy.text(0.0)
    for _ in range(30):
        world.policy.record([], RoundTime(1, 1, 1.6))
    world.depths.clear()
    for _ in range(400):
        depths = world.policy.plan([text], [0])
        world.run([text], depths, [int(depth > 0) for depth in depths])
    assert sum(map(bool, world.depths)) > 380, "2 tokens in 1.5 s"
    world.level = 1.2
    for _ in range(400):
        depths = world.policy.plan([text], [0])
        world.run([text], depths, [int(depth > 0) for depth in depths])
    assert sum(map(bool, world.depths[-50:])) <= 2, "2 tokens in 2.2 s"


@pytest.mark.parametrize("cold", ["draft", "reading", "forward"])
@pytest.mark.parametrize("level", [0.02, 0.1])
@pytest.mark.parametrize("right", [0.7, 0.9])
def test_a_cold_start_does_not_end_drafting(cold: str, level: float, right: float) -> None:
    world = World(level=level, token=0.02, reading=0.01, cold={cold: (1 if cold == "reading" else 6, 10.0)})
    world.speed(right, 500, of_text=50)
    warm = World(level=level, token=0.02, reading=0.01)
    warm.speed(right, 500, of_text=50)
    assert world.speed(right, 1500, of_text=50) > 0.95 * warm.speed(right, 1500, of_text=50)


@pytest.mark.parametrize("rounds", [3, 12, 40])
@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_a_cold_start_does_not_make_drafting_look_good(rounds: int, factor: float) -> None:
    """Forwards were slow while plain decoding was measured; beside that, long drafts look like a gain of twice."""
    world = World(level=0.05, token=0.25, cold={"forward": (rounds, factor)})
    world.speed(0.4, 300, of_text=50)
    assert world.speed(0.4, 1500, of_text=50) > 0.93


def test_one_slow_first_draft_does_not_end_drafting() -> None:
    world = World()
    text = world.policy.text(0.0)
    for number in range(8):
        depths = world.policy.plan([text], [0])
        world.level = 50.0 if number < 4 else 0.1
        world.run([text], depths, [0])
    assert world.speed(0.95, 6000) > 2.0


def test_reading_holds_other_texts_up_by_a_quarter_or_for_one_text() -> None:
    world = World(level=0.001, reading=0.01)
    world.speed(0.95, 200)
    texts = [world.policy.text(0.0) for _ in range(10)]
    assert sum(map(bool, world.policy.plan(texts, [PROMPT] * 10))) == 1
    assert sum(map(bool, world.policy.plan(texts, [10] * 10))) == 2
    assert sum(map(bool, world.policy.plan(texts, [0] * 5 + [10] * 5))) == 7


def test_it_drafts_for_nobody_before_plain_rounds_were_measured_nor_where_the_drafter_cannot() -> None:
    world = World()
    text = world.policy.text(0.0)
    assert world.policy.plan([text], [0]) == [0]
    world.run([text], [0], [0])
    world.run([text], [0], [0])
    assert world.policy.plan([text], [0])[0] > 0
    assert world.policy.plan([text], [None]) == [0]
    assert world.policy.plan([], []) == []


def test_after_a_plain_decision_texts_are_not_looked_at_for_a_while_unless_one_is_new() -> None:
    world = World(level=5.0)
    texts = [world.policy.text(0.0) for _ in range(64)]
    looked = 0

    def unread() -> list[int]:
        nonlocal looked
        looked += 1
        return [0] * 64

    class Lazy:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(unread())

    for _ in range(200):
        world.run(texts, world.policy.plan(texts, Lazy()), [0] * 64)
    assert looked < 30
    texts[0] = world.policy.text(0.0)
    before = looked
    world.policy.plan(texts, Lazy())
    assert looked == before + 1


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
    free, dear, slow = shape_of(1e-6, 1e-3), shape_of(0.05, 1e-3), shape_of(1e-6, 0.2)
    assert free.least < -7 < -4 < dear.least < 0, "a node must promise what its part of the forward is worth"
    assert free.min_score < -4 < -2 < slow.min_score < 0, "a level's nodes what the drafter's time is worth"
    assert shape_of(5.0, 5.0).least == pytest.approx(-0.105, abs=0.001), "never certainty"


def test_a_draft_that_costs_nothing_must_promise_what_ours_win_in_the_same_time() -> None:
    world = World(level=0.25 / 4, noise=0.0, policy=Policy(TreeShape.chain(4)))
    text = world.policy.text(0.0)
    assert world.policy.matching(text) == 0.0, "before anything is known"
    for _ in range(40):
        world.run([text], world.policy.plan([text], [0]), [4])
    assert 2.5 < world.policy.matching(text) < 3.1, "5 tokens in 1.25 s are 4 in 1"


def test_clients_with_many_temperatures_cost_no_memory() -> None:
    policy = Policy(TreeShape.chain(4))
    before = len({id(policy.text(number / 777).accepted._prior) for number in range(5000)})
    assert before <= 21
    assert policy.text(sys.float_info.max).accepted.totals() == policy.text(2.0).accepted.totals()


def test_the_fuller_a_batch_the_likelier_a_guess_must_be_to_go_along() -> None:
    """So guesses yield first under load: alone almost any of them pays, beside many rows only the likely ones."""
    cost = Cost()
    for size in (1, 4, 16, 64, 256) * 30:
        cost.observe(size, 0.020 + 0.0005 * size)
    least = [least_chance(cost, rows) for rows in (1, 8, 32, 64)]
    assert least == sorted(least)
    assert least[0] < 0.05
    assert least[-1] == 0.5
