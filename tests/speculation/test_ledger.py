"""What drafts cost behind their own round, and what follows. A plain round takes a second here."""

from __future__ import annotations

import pytest

from moa.speculation.ledger import Ledger


def begun() -> Ledger:
    """One that knows plain decoding."""
    ledger = Ledger()
    for _ in range(8):
        ledger.plain(9.0)  # what a process finds in memory when it begins says nothing
    for _ in range(16):
        assert ledger.deepest == 0
        ledger.plain(1.0)
    return ledger


def look_behind(ledger: Ledger, *late: float) -> int:
    """Plain rounds behind a draft, which take so much longer than a second, and none then; returns
    how many there are before another draft may come."""
    rounds = 0
    while not ledger.deepest:
        ledger.plain(1.0 + (late[rounds] if rounds < len(late) else 0.0))
        rounds += 1
    return rounds


def plain_until_deeper(ledger: Ledger) -> int:
    """How many plain rounds go by before drafts may be deeper than now."""
    now = ledger.deepest
    rounds = 0
    while ledger.deepest == now:
        ledger.plain(1.0)
        rounds += 1
    return rounds


def prove(ledger: Ledger, *depths: int) -> None:
    """Drafts that win, each with a round behind it that says so."""
    for depth in depths:
        assert ledger.deepest == depth
        ledger.drafted(depth, 1.0 + depth, 1.1)
        assert ledger.deepest == 0
        ledger.plain(1.0)


def test_drafts_grow_twofold_as_long_as_they_win_and_a_round_behind_each_confirms_it() -> None:
    ledger = begun()
    prove(ledger, 1, 2, 4, 8)
    assert ledger.deepest == 16
    ledger.drafted(8, 9.0, 1.1)
    assert ledger.deepest == 16, "nobody looks behind what has won before"


def test_what_a_draft_pushed_out_is_counted_and_earned_back_before_the_next_one() -> None:
    """The draft itself wins most of a second; the rounds behind it lose four."""
    ledger = begun()
    ledger.drafted(1, 2.0, 1.2)
    late = (1.5, 1.0, 0.8, 0.4, 0.2, 0.1)
    assert look_behind(ledger, *late) == pytest.approx(8 + (4.0 - 0.8) / 0.025, abs=1)


@pytest.mark.parametrize(("seconds", "waits"), [(2.2, 0.2 / 0.025), (5.0, 3.0 / 0.025), (1e6, 512)])
def test_the_more_a_trial_loses_the_longer_the_next_one_waits(seconds: float, waits: float) -> None:
    ledger = begun()
    ledger.drafted(1, 2.0, seconds)
    assert look_behind(ledger) == pytest.approx(8 + waits, abs=1)


def test_a_deep_trial_that_loses_leaves_what_has_won() -> None:
    ledger = begun()
    prove(ledger, 1, 2)
    ledger.drafted(4, 5.0, 7.0)
    assert look_behind(ledger) == 8
    assert ledger.deepest == 2
    assert plain_until_deeper(ledger) == pytest.approx(2.0 / 0.025, abs=1)
    assert ledger.deepest == 4


def test_drafts_that_have_won_and_lose_now_end_within_a_few_rounds() -> None:
    ledger = begun()
    prove(ledger, 1)
    rounds = 0
    while ledger.deepest > 0:
        ledger.drafted(1, 1.5, 2.0)
        rounds += 1
    assert rounds == 4
    assert look_behind(ledger) == pytest.approx(8 + rounds * 0.5 / 0.025, abs=1)
    assert ledger.deepest == 1, "as if nothing had won"


def test_drafts_before_anything_is_known_say_nothing() -> None:
    """As where an experiment drafts in every round."""
    ledger = Ledger()
    for _ in range(40):
        ledger.drafted(4, 2.0, 50.0)
    assert ledger.deepest == 0
    assert look_behind(ledger) == 8 + 16
