from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from moa.speculation.acceptance import AcceptanceTracker
from moa.speculation.batch_costs import BatchCosts, BatchRun, Curve, Typical
from moa.speculation.utility import Drafted, Utility
from moa.tree import TreeShape


def played(utility: Utility, texts: list[AcceptanceTracker], levels: list[int], accepted: list[int], *,
           level: float = 0.1, token: float = 0.0, noise: float = 1.0) -> float:  # fmt: skip
    """Record a round of these texts, if wanted. Its forward takes a second, and `token` more for each of its tokens
    beyond one; a level takes `level` for each text that drafts. Returns its seconds."""
    drafting, drafted = sum(map(bool, levels)), sum(levels)
    ran = BatchRun(
        texts=len(texts),
        drafting=drafting,
        steps=max(levels),
        tokens=len(texts) + drafted,
        drafted=drafted,
        won=len(texts) + sum(accepted),
        draft_seconds=noise * level * max(levels) * drafting,
        forward_seconds=noise * (1.0 + token * (len(texts) + drafted - 1)),
    )
    drafts = zip(texts, levels, levels, accepted, strict=True)
    if utility.plain_spell.measured:
        utility.record([Drafted(text, deep, deep, nodes, right) for text, deep, nodes, right in drafts if deep], ran)
        utility.look(texts, lambda places: [0.6] * len(places))
    return ran.draft_seconds + ran.forward_seconds


def looked_at(utility: Utility) -> AcceptanceTracker:
    """A text of which the target is as sure as of many."""
    text = utility.text(0.0)
    text.sure = 0.6
    return text


def planned(utility: Utility, texts: list[AcceptanceTracker], missed: Sequence[int | None]) -> list[int]:
    """Levels of the next round, as those who run rounds ask for them."""
    return [0] * len(texts) if utility.plain_spell.covers(len(texts)) else utility.levels(texts, missed)


def decode(
    right: float, *, level: float, tokens: int = 3000, utility: Utility | None = None, reading: float = 0.0,
    text: int = 10**9, noise: float = 0.06, texts: int = 1, token: float = 0.0,
) -> float:  # fmt: skip
    """Tokens a second beside plain decoding's, of texts whose levels are accepted with this chance, `texts` at a
    time. A plain round takes a second; `reading` is what a token that the drafter had no part in costs it, the prompt's
    100 too."""
    rng, utility = random.Random(0), utility or Utility(TreeShape.chain(8))
    spent, won = 0.0, 0
    while won < tokens:
        batch = [utility.text(0.0) for _ in range(texts)]
        missed: list[int | None] = [100 for _ in batch]
        begun = won
        while won < tokens and won - begun < text * texts:
            levels = planned(utility, batch, missed)
            for place, deep in enumerate(levels):
                if deep and missed[place]:
                    spent += missed[place] * reading  # type: ignore[operator]
                    utility.costs.read(missed[place] * reading, missed[place])  # type: ignore[operator,arg-type]
                    missed[place] = 0
            accepted = [next((n for n in range(deep) if rng.random() >= right), deep) for deep in levels]
            # Of mean 1, with a long tail as on a machine that does other things too.
            luck = rng.lognormvariate(-(noise**2) / 2, noise)
            spent += played(utility, batch, levels, accepted, level=level, token=token, noise=luck)
            won += texts + sum(accepted)
            missed = [0 if deep else (before or 0) + 1 for deep, before in zip(levels, missed, strict=True)]
    return won / spent / texts * (1.0 + token * (texts - 1))


@pytest.mark.parametrize("right", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("level", [0.3, 0.6])
def test_it_is_never_slower_than_plain_decoding(right: float, level: float) -> None:
    utility = Utility(TreeShape.chain(8))
    decode(0.5, level=level, utility=utility, tokens=200)
    assert decode(right, level=level, utility=utility) > 0.98


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("level", [0.05, 0.1, 0.65])
@pytest.mark.parametrize("text", [40, 150])
def test_a_drafter_that_has_to_read_first_makes_nothing_slower(right: float, level: float, text: int) -> None:
    """A prompt is read in the time of three plain rounds; beside a small target a level costs two thirds of one."""
    utility = Utility(TreeShape.chain(8))
    decode(right, level=level, utility=utility, tokens=200, reading=0.03, text=text)
    assert decode(right, level=level, utility=utility, tokens=2500, reading=0.03, text=text) > 0.98


@pytest.mark.parametrize("right", [0.0, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_noisy_machine_does_not_make_drafting_look_good_for_long(right: float, level: float) -> None:
    utility = Utility(TreeShape.chain(8))
    decode(right, level=level, utility=utility, tokens=600, noise=0.7)
    assert decode(right, level=level, utility=utility, tokens=4000, noise=0.7) > 0.96


def test_reading_is_worth_it_where_drafts_hit() -> None:
    assert decode(0.95, level=0.1, reading=0.03, text=150) > 2.5


def test_where_drafts_hit_it_drafts_far() -> None:
    assert decode(0.95, level=0.1) > 3.0
    assert decode(0.6, level=0.1) > 1.5


def test_a_text_that_becomes_easy_is_drafted_for_again() -> None:
    utility = Utility(TreeShape.chain(8))
    text = utility.text(0.0)
    for _ in range(400):
        levels = planned(utility, [text], [0])
        played(utility, [text], levels, [0], level=0.4)
    assert utility.levels([text], [0])[0] <= 2
    rounds = 0
    while (levels := planned(utility, [text], [0]))[0] < 4:
        played(utility, [text], levels, levels)
        rounds += 1
        assert rounds < 2000


def test_only_the_first_drafts_of_a_text_say_what_is_usual() -> None:
    usual = AcceptanceTracker()
    text = AcceptanceTracker(usual)
    for number in range(1, 9):
        text.add(0, 4)
        assert (text.rounds, usual.rounds) == (number, min(number, 3))


def test_a_new_text_expects_what_the_others_had_but_learns_soon() -> None:
    usual = AcceptanceTracker()
    for _ in range(200):
        usual.add(0, 4)
    fresh = AcceptanceTracker(usual)
    assert fresh.accepted.chances(4)[0] < 0.1
    assert fresh.expected(4)[0][0] == fresh.accepted.chances(4)[0]
    before = fresh.expected(4)[0][3]
    fresh.add(4, 4)
    assert fresh.expected(4)[0][3] > 5 * before, "one draft that was right to its end says much of a text"
    for _ in range(12):
        fresh.add(4, 4)
    assert fresh.accepted.chances(4)[0] > 0.7
    assert fresh.expected(4)[0][3] > 2.5


def test_a_text_is_expected_to_do_as_others_of_which_the_target_was_as_sure() -> None:
    utility = Utility(TreeShape.chain(4))
    asked: list[list[int]] = []

    def begun(sure: float) -> AcceptanceTracker:
        text = utility.text(0.0)
        utility.levels([text], [None])
        utility.look([text], lambda places: asked.append(list(places)) or [sure] * len(places))
        assert text.sure == sure
        return text

    for _ in range(9):
        for sure, right in ((0.99, 4), (0.2, 0)):
            played(utility, [begun(sure)], [4], [right])
    assert begun(0.97).expected(4)[0][3] > 3
    assert begun(0.1).expected(4)[0][3] < 1
    assert utility.text(0.0).expected(4)[0][3] > 1.5, "of one that nobody has looked at nothing is known"
    assert asked == [[0]] * 20, "once each"


@pytest.mark.parametrize(("prompt", "waits"), [(20, False), (30, True)])
def test_a_text_waits_to_be_looked_at_unless_its_reading_takes_little_of_a_round(prompt: int, waits: bool) -> None:
    utility = Utility(TreeShape.chain(4))
    text = utility.text(0.0)
    for levels in (0, 0, 0, 1, 1, 1, 1, 4, 4, 4):
        assert utility.levels([utility.text(0.0)], [1]) == [0], "what reading costs is not known yet"
        played(utility, [text], [levels], [levels])
    utility.costs.read(0.01, 1)
    fresh = utility.text(0.0)
    levels = utility.levels([fresh], [prompt])
    assert levels == ([0] if waits else [4])
    played(utility, [fresh], levels, levels)
    assert fresh.sure == 0.6, "the round has shown it"
    assert utility.levels([fresh], [prompt])[0] >= 4


def test_few_texts_are_looked_at_in_a_round_and_again_now_and_then() -> None:
    utility = Utility(TreeShape.chain(4))
    texts = [utility.text(0.0) for _ in range(20)]
    for looked in (8, 16, 20):
        utility.levels(texts, [None] * 20)
        utility.look(texts, lambda places: [0.9] * len(places))
        utility.look(texts, lambda places: [0.5] * len(places))  # in a round that was not decided on
        assert [text.sure for text in texts] == [0.9] * looked + [None] * (20 - looked)
    for _ in range(4):
        utility.levels(texts, [0] * 20)
        utility.look(texts, lambda places: [0.5] * len(places))
    assert Counter(text.sure for text in texts) == {0.7 * 0.9 + 0.3 * 0.5: 8, 0.9: 12}


def test_the_first_rounds_are_plain_and_the_next_drafts() -> None:
    utility = Utility(TreeShape.chain(6))
    text = utility.text(0.0)
    for _ in range(3):
        assert utility.levels([text], [0]) == [0]
        played(utility, [text], [0], [0])
    for _ in range(4):
        assert utility.levels([text], [0]) == [1], "what one level costs is known before more are drafted"
        played(utility, [text], [1], [1])
    assert utility.levels([text], [0]) == [6]
    assert utility.levels([text], [None]) == [0], "the drafter has no memory for this one"


def test_what_drafting_has_to_beat_is_measured_again() -> None:
    """A slow start must not make drafting look good for ever."""
    utility = Utility(TreeShape.chain(4))
    text, plain = utility.text(0.0), 0
    for _ in range(2):
        played(utility, [text], [0], [0], noise=9.0)
    for _ in range(400):
        levels = planned(utility, [text], [0])
        plain += levels == [0]
        played(utility, [text], levels, [0], level=0.5)
    assert plain > 280


def test_a_draft_that_costs_nothing_must_promise_what_ours_win_in_the_same_time() -> None:
    utility = Utility(TreeShape.chain(4))
    text = utility.text(0.0)
    assert utility.matching(text) == 1.0, "before anything is known"
    for _ in range(20):
        played(utility, [text], [0], [0])
        played(utility, [text], [1], [1], level=0.25 / 4)
        played(utility, [text], [4], [4], level=0.25 / 4)
    utility.levels([text], [0])
    assert 2.8 < utility.matching(text) < 3.0, "5 tokens in 1.25 s are 4 in 1"
    for _ in range(40):
        played(utility, [text], [4], [0], level=0.25 / 4)
    assert utility.matching(text) < 0.5


@pytest.mark.parametrize("token", [0.1, 1.0])
@pytest.mark.parametrize("right", [0.3, 0.8])
def test_where_a_full_batch_pays_for_every_token_nothing_is_slower_than_plain_decoding(
    right: float, token: float
) -> None:
    utility = Utility(TreeShape.chain(8))
    assert decode(right, level=0.02, utility=utility, tokens=400) > 0.98, "a single text learns that drafts are cheap"
    decode(right, level=0.02, utility=utility, texts=48, token=token, tokens=10000, reading=0.01)
    assert decode(right, level=0.02, utility=utility, texts=48, token=token, tokens=20000, reading=0.01) > 0.98


def test_among_many_texts_those_draft_whose_drafts_hit() -> None:
    utility = Utility(TreeShape.chain(4))
    sure, lost = ([utility.text(0.0) for _ in range(8)] for _ in range(2))
    for right, texts in ((4, sure), (0, lost)):
        for text in texts:
            for _ in range(20):
                text.add(right, 4)
    for tokens in (16, 80, 48, 16, 80, 48):  # the first of a size does not count
        utility.costs.add(BatchRun(texts=16, tokens=tokens, won=16, forward_seconds=1.0 + 0.02 * tokens))
    levels = utility.levels([*sure, *lost], [0] * 16)
    assert all(deep > 0 for deep in levels[:8])
    assert not any(levels[8:])


def test_what_the_drafter_must_read_first_holds_the_other_texts_up_by_a_quarter_at_most() -> None:
    utility = Utility(TreeShape.chain(4))
    texts = [looked_at(utility) for _ in range(10)]
    for text in texts:
        for _ in range(20):
            text.add(4, 4)
    for _ in range(3):
        played(utility, texts, [0] * 10, [0] * 10)
    assert sum(map(bool, utility.levels(texts, [10] * 10))) == 1, "what reading costs is not known yet"
    utility.costs.read(0.1, 10)
    assert sum(map(bool, utility.levels(texts, [10] * 10))) == 2
    assert sum(map(bool, utility.levels(texts, [0] * 5 + [10] * 5))) == 7


def test_one_slow_round_changes_nothing_and_nothing_larger_is_cheaper() -> None:
    curve = Curve()
    for _ in range(20):
        curve.add(1, 1.0)
        curve.add(5, 1.4)
        curve.add(9, 1.2)
    curve.add(5, 500.0)
    curve.add(1, 500.0)
    assert curve.at([1, 3, 5, 9]).tolist() == pytest.approx([1.0, 1.2, 1.4, 1.4])
    assert curve.at(17) == pytest.approx(1.8), "beyond what was measured as steep as on average"


def test_typical_is_what_two_thirds_of_the_latest_exceed_however_they_came() -> None:
    rng, typical, seen = random.Random(0), Typical(), []
    for _ in range(200):
        seen.append(rng.choice([0.5, rng.random()]))
        typical.add(seen[-1])
        latest = seen[-31:]
        assert list(typical.latest) == latest
        assert typical.value == sorted(latest)[(len(latest) - 1) // 3]


def test_a_level_that_was_slow_once_does_not_end_drafting_for_good() -> None:
    """The first runs of a graph make its kernels, and another process may run in one of them."""
    utility = Utility(TreeShape.chain(8))
    text = utility.text(0.0)
    for levels in (0, 0, 1, 1, 1, 1, 2, 2):
        played(utility, [text], [levels], [0], level=0.1 if levels < 2 else 50.0)
    assert decode(0.95, level=0.1, utility=utility, tokens=6000, reading=0.03, text=60) > 2.0


def test_where_plain_decoding_is_best_for_all_of_many_texts_few_rounds_look_at_them() -> None:
    utility = Utility(TreeShape.chain(4))
    texts = [looked_at(utility) for _ in range(64)]
    for _ in range(3):
        played(utility, texts, [0] * 64, [0] * 64, token=1.0)
    utility.costs.read(50.0, 1)
    looked = 0
    for _ in range(170):
        if utility.plain_spell.covers(64):
            levels = [0] * 64
        else:
            looked += 1
            levels = utility.levels(texts, [1] * 64)
        played(utility, texts, levels, [0] * 64, level=9.0, token=1.0)
    assert looked <= 14
    while not utility.plain_spell.covers(64):
        played(utility, texts, utility.levels(texts, [1] * 64), [0] * 64, level=9.0, token=1.0)
    assert utility.plain_spell.covers(60), "about as many"
    assert not utility.plain_spell.covers(30), "where half of them are gone a draft may pay"
    assert not utility.plain_spell.covers(60), "and what was decided for more says nothing"


def test_a_text_that_is_decoded_plainly_takes_few_decisions_and_little_learning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utility, done = Utility(TreeShape.chain(6)), Counter[str]()
    text = utility.text(0.0)
    utility.costs.read(50.0, 1)

    def counted(owner: type, name: str) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: done.update([name]) or whole(*given))

    for _ in range(140):
        played(utility, [text], planned(utility, [text], [1]), [0])
    counted(Utility, "levels")
    counted(Utility, "record")
    counted(Curve, "_draw")
    for _ in range(1000):
        levels = planned(utility, [text], [1])
        assert levels == [0]
        played(utility, [text], levels, [0])
    assert done["levels"] <= 60
    assert done["record"] <= 320
    assert not done["_draw"], "no median moved"


def test_what_was_decided_for_others_does_not_hold_for_a_new_text() -> None:
    utility = Utility(TreeShape.chain(6))
    texts = [utility.text(0.0) for _ in range(16)]
    utility.costs.read(50.0, 1)
    for _ in range(140):
        played(utility, texts[:1], planned(utility, texts[:1], [1]), [0])
    while not utility.plain_spell.covers(1):
        utility.levels(texts[:1], [1])
    utility.text(0.0)
    assert not utility.plain_spell.covers(1)
    utility.levels(texts, [1] * 16)
    for _ in range(4):
        utility.text(0.0)
        assert utility.plain_spell.covers(16), "a few new ones among many"
    utility.text(0.0)
    assert not utility.plain_spell.covers(16)


def test_a_decision_after_few_measurements_is_looked_at_again_soon() -> None:
    utility = Utility(TreeShape.chain(6))
    text = utility.text(0.0)
    utility.costs.read(50.0, 1)
    for _ in range(6):
        assert not utility.plain_spell.covers(1)
        played(utility, [text], utility.levels([text], [1]), [0])


def test_the_first_draft_among_others_is_a_single_level() -> None:
    utility = Utility(TreeShape.chain(6))
    texts = [looked_at(utility) for _ in range(8)]
    for _ in range(3):
        played(utility, texts, [0] * 8, [0] * 8)
    levels = utility.levels(texts, [100] * 8)
    assert sorted(levels) == [0] * 7 + [1]
    for _ in range(4):
        played(utility, texts, levels, [int(deep > 0) for deep in levels])
    utility.costs.read(0.1, 100)
    assert max(utility.levels(texts, [0] * 8)) > 1


def test_clients_with_many_temperatures_cost_no_memory() -> None:
    utility = Utility(TreeShape.chain(4))
    for number in range(5000):
        text = utility.text(number / 777)
        utility.levels([text], [None])
        utility.look([text], lambda places: [0.25 * (number % 4)] * len(places))  # noqa: B023
    assert len(utility._usual._kinds) <= 5 * 21


def test_the_first_round_of_a_text_says_nothing_of_plain_decoding() -> None:
    """It comes after a prompt, which has emptied the caches; what looks slow would make drafting look good."""
    utility = Utility(TreeShape.chain(6))
    for _ in range(9):
        text = utility.text(0.0)
        for noise in (5.0, 1.0, 1.0):
            played(utility, [text], [0], [0], noise=noise)
    assert utility.costs.plain(1, 1) == 1.0
    assert utility.costs.rounds == 27


def test_rounds_that_run_prompts_alone_are_no_rounds_of_plain_decoding() -> None:
    utility = Utility(TreeShape.chain(6))
    text = utility.text(0.0)
    for _ in range(9):
        utility.record([], BatchRun(texts=0, tokens=64, won=0, forward_seconds=1.0))
    assert utility.costs.rounds == 0
    assert utility.levels([text], [1]) == [0], "there is no baseline yet"


def test_a_single_text_is_decided_as_one_of_a_batch() -> None:
    rng = random.Random(5)
    for _ in range(300):
        utility = Utility(TreeShape.chain(6))
        text = looked_at(utility)
        for _ in range(rng.randrange(12)):
            text.add(rng.randrange(7), 6)
        level, fixed = rng.uniform(0.02, 1.5), rng.uniform(0, 0.5)
        for tokens, drafting in ((1, 0), (1, 0), *[(2, 1)] * 4, (4, 1), (4, 1), (7, 1), (7, 1)):
            utility.costs.add(
                BatchRun(
                    texts=1, tokens=tokens, drafting=drafting, steps=tokens - 1, drafted=tokens - 1, won=tokens,
                    forward_seconds=1.0 + 0.05 * tokens,
                    draft_seconds=drafting * (fixed + level * (tokens - 1)), rest_seconds=0.1,
                )
            )  # fmt: skip
        utility.costs.read(rng.uniform(0, 0.1), 10)
        utility.costs.credit, utility.costs.since, utility._learning = 1.0, 0.0, 0.0
        missed = rng.choice([0, 30, 300])
        plain, reading = utility.costs.plain(1, 1), np.array([utility.costs.price * missed])
        gains, steps = map(np.array, text.expected(6))
        best, levels = utility._best(1, 0, plain, gains[None], steps[None], reading)
        assert utility.levels([text], [missed]) == ([levels] if len(best) else [0])


def test_the_first_run_of_a_size_does_not_count() -> None:
    curve = Curve()
    curve.add(4, 9.0)
    assert not curve
    assert curve.of(4) == 0.0
    curve.add(4, 1.0)
    assert curve.of(4) == 1.0
    for size in (300, 301, 302):  # a full batch is rarely as large twice
        curve.add(size, 9.0 if size == 300 else 3.0)
    assert curve.of(301) == 3.0


def test_the_first_level_and_each_further_one_have_their_own_cost() -> None:
    costs = BatchCosts()
    for steps in (0, 0, 4, 4, 1, 1, 1, 1, 6, 6, 6, 6):
        assert not (costs.drafted and steps < 6), "others are known beside some of one level"
        costs.add(
            BatchRun(
                texts=1, drafting=int(steps > 0), steps=steps, tokens=1 + steps, drafted=steps, won=1,
                draft_seconds=2.0 + 0.25 * (steps - 1) if steps else 0.0, forward_seconds=1.0,
            )
        )  # fmt: skip
    assert costs.draft(1, 1) == 2.0
    assert costs.draft(1, [2, 17]).tolist() == pytest.approx([2.25, 6.0])


def planned_shape(token: float, level: float, texts: int = 1) -> TreeShape:
    """The shape where a node costs so much of a plain round, and a level so much, once both are known."""
    utility = Utility(TreeShape(8, 16, 63))
    batch = [utility.text(0.0) for _ in range(texts)]
    for levels in (0, 0, 0, 1, 1, 1, 1, 6, 6, 60, 60, 6, 6, 60, 60):
        played(utility, batch, [levels] * texts, [levels // 3] * texts, level=level / texts, token=token)
    utility.levels(batch, [0] * texts)
    return utility.shape(TreeShape(8, 16, 63, min_score=-9.0), 16)


def test_a_tree_is_as_wide_and_as_deep_as_its_nodes_and_levels_are_cheap() -> None:
    free, dear, slow = planned_shape(1e-6, 1e-3), planned_shape(0.05, 1e-3), planned_shape(1e-6, 0.2)
    assert free.least < -7 < -4 < dear.least < 0, "a node must promise what its part of the forward is worth"
    assert free.min_score < -4 < -2 < slow.min_score < 0, "a level's nodes what the drafter's time is worth"
    assert free.least == pytest.approx(slow.least, abs=2)
    assert planned_shape(0.01, 1e-3, texts=4).least > planned_shape(0.01, 1e-3).least, "others wait, too"
    assert planned_shape(5.0, 5.0).least == planned_shape(5.0, 5.0).min_score == math.log(0.9)


def test_trees_grow_with_the_forwards_that_were_measured() -> None:
    utility = Utility(TreeShape(8, 16, 63))
    text, asked = utility.text(0.0), []
    for _ in range(14):
        levels, nodes = utility.levels([text], [0])[0], 0
        if levels:
            nodes = utility.shape(TreeShape(8, 16, 63), levels).nodes
            asked.append(nodes)
        played(utility, [text], [nodes], [nodes], level=1e-3)
    assert asked[0] == 8
    assert all(after <= 2 * before + 2 for before, after in pairwise(asked))
    assert asked[-1] == 63
