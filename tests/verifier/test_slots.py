from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloud_verifier.sessions.slots import SlotShares


@dataclass(eq=False)
class Holder:
    """A session, as far as slots go."""

    principal: str
    used: float = 0.0
    owner: Any = "a connection"
    lease: Any = "a slot"
    at_rest: bool = True

    def works(self) -> Holder:
        """The same in the middle of a round."""
        self.at_rest = False
        return self


def full(*principals: str) -> tuple[SlotShares, list[Holder]]:
    shares = SlotShares(len(principals), idle_seconds=2.0, claim_seconds=2.0, pause_seconds=0.5)
    for name in principals:
        shares.take(name)
    return shares, [Holder(name) for name in principals]


def test_a_single_principal_may_have_all_slots() -> None:
    shares, holders = full("a", "a", "a", "a")
    assert shares.free == 0
    assert shares.victim(Holder("a", lease=None), holders, 0.0) is None
    assert not shares.must_yield("a", 0.0)


def test_whoever_has_less_than_its_share_takes_from_whoever_has_more_even_between_two_rounds() -> None:
    shares, holders = full("a", "a", "a", "a")
    holders[0].works()
    holders[2].used = -1.0
    assert shares.victim(Holder("b", lease=None), holders, 0.0) is holders[2]
    assert shares.victim(Holder("a", lease=None), holders, 0.0) is None, "but not from its own"


def test_nobody_takes_from_one_that_has_its_share() -> None:
    shares, holders = full("a", "a", "b", "b")
    assert shares.victim(Holder("a", lease=None), holders, 0.0) is None


def test_when_all_work_the_next_slot_of_the_greedy_is_kept_for_the_one_that_waits() -> None:
    shares, holders = full("a", "a", "a", "a")
    assert shares.victim(Holder("b", lease=None), [h.works() for h in holders], 0.0) is None
    assert shares.must_yield("a", 0.1)
    shares.give_back("a")
    assert not shares.must_yield("a", 0.1), "one slot for one claim"
    assert not shares.may_take("a", 0.1)
    assert shares.may_take("b", 0.1)
    shares.take("b")
    assert shares.free == 0
    assert not shares.must_yield("a", 0.2)


def test_claims_are_served_in_order_and_do_not_last() -> None:
    shares, holders = full("a", "a", "a", "a")
    working = [holder.works() for holder in holders]
    shares.victim(Holder("b", lease=None), working, 0.0)
    shares.victim(Holder("c", lease=None), working, 0.5)
    shares.give_back("a")
    assert shares.may_take("b", 1.0)
    assert not shares.may_take("c", 1.0)
    assert shares.may_take("c", 2.1)
    assert shares.may_take("a", 3.0)


def test_unused_slots_go_first_and_detached_ones_before_paused_ones() -> None:
    shares, holders = full("a", "a", "b", "b")
    holders[3].owner = None
    assert shares.victim(Holder("c", lease=None), holders, 10.0) is holders[3]
    holders[3].owner = "back"
    holders[1].used = -5.0
    assert shares.victim(Holder("b", lease=None), holders, 10.0) is holders[1]


def test_however_many_wait_they_ask_again_one_after_another() -> None:
    """Refusals a second must not grow with those who wait: at ten times the capacity they took half of the time."""
    shares, _ = full("a", "a", "a", "a")
    asked = [shares.appointment("a", 0.0) for _ in range(40)]
    assert asked == sorted(asked)
    for begin in (0.5, 1.0, 3.0):
        assert sum(begin <= at < begin + 0.5 for at in asked) <= 5, "four slots, so four a pause, and one at its edge"
    assert max(asked) <= 20 * 0.5


def test_the_first_one_refused_waits_for_a_pause_only() -> None:
    shares, _ = full("a", "a", "a", "a")
    assert shares.appointment("a", 0.0) == 0.5
    assert shares.appointment("a", 100.0) == 0.5, "the appointments before are over"


def test_those_who_wait_for_a_slot_of_their_own_share_do_not_wait_behind_a_greedy_principal() -> None:
    shares, holders = full("a", "a", "a", "a")
    for _ in range(100):
        shares.appointment("a", 0.0)
    shares.victim(Holder("b", lease=None), [h.works() for h in holders], 0.0)
    assert shares.appointment("b", 0.0) == 0.5, "its claim ends after 2 s"


def test_appointments_are_bounded() -> None:
    shares, _ = full("a", "a", "a", "a")
    assert max(shares.appointment("a", 0.0) for _ in range(10_000)) == 20 * 0.5
