from __future__ import annotations

from cloud_verifier.engine.job import Lease
from cloud_verifier.sessions.session import ServerSession
from cloud_verifier.sessions.slots import PageReservations, SlotShares
from tests.verifier.sessions import outbox, session, works


def holder(principal: str) -> ServerSession:
    """A session with a slot."""
    made = session(1, principal=principal)
    made.lease = Lease(made.id, principal)
    return made


def full(*principals: str) -> tuple[SlotShares, list[ServerSession]]:
    shares = SlotShares(len(principals), idle_seconds=2.0, claim_seconds=2.0, pause_seconds=0.5)
    for name in principals:
        shares.take(name)
    return shares, [holder(name) for name in principals]


def test_whoever_has_less_than_its_share_takes_from_whoever_has_more_even_between_two_rounds() -> (
    None
):
    shares, holders = full("a", "a", "a", "a")
    works(holders[0])
    holders[2].used = -1.0
    assert shares.victim(session(2, principal="b"), holders, 0.0) is holders[2]
    assert shares.victim(session(2, principal="a"), holders, 0.0) is None, "but not from its own"
    shares, holders = full("a", "a", "b", "b")
    assert shares.victim(session(2, principal="a"), holders, 0.0) is None, (
        "nor one that has its share"
    )


def test_when_all_work_the_next_slot_of_the_greedy_is_kept_for_the_one_that_waits() -> None:
    shares, holders = full("a", "a", "a", "a")
    assert shares.victim(session(2, principal="b"), [works(h) for h in holders], 0.0) is None
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
    working = [works(one) for one in holders]
    shares.victim(session(2, principal="b"), working, 0.0)
    shares.victim(session(2, principal="c"), working, 0.5)
    shares.give_back("a")
    assert shares.may_take("b", 1.0)
    assert not shares.may_take("c", 1.0)
    assert shares.may_take("c", 2.1)
    assert shares.may_take("a", 3.0)


def test_unused_slots_go_first_and_detached_ones_before_paused_ones() -> None:
    shares, holders = full("a", "a", "b", "b")
    holders[3].detach()
    assert shares.victim(session(2, principal="c"), holders, 10.0) is holders[3]
    holders[3].attach(outbox())
    holders[1].used = -5.0
    assert shares.victim(session(2, principal="b"), holders, 10.0) is holders[1]


def test_however_many_wait_they_ask_again_one_after_another() -> None:
    """Refusals a second must not grow with those who wait: at ten times the capacity they took half
    of the time."""
    shares, _ = full("a", "a", "a", "a")
    asked = [shares.appointment("a", 0.0) for _ in range(40)]
    assert asked == sorted(asked)
    for begin in (0.5, 1.0, 3.0):
        assert sum(begin <= at < begin + 0.5 for at in asked) <= 5, (
            "four slots, so four a pause, and one at its edge"
        )
    assert max(asked) <= 20 * 0.5
    assert max(shares.appointment("a", 0.0) for _ in range(10_000)) == 20 * 0.5


def test_those_who_wait_for_a_slot_of_their_own_share_do_not_wait_behind_a_greedy_principal() -> (
    None
):
    shares, holders = full("a", "a", "a", "a")
    for _ in range(100):
        shares.appointment("a", 0.0)
    shares.victim(session(2, principal="b"), [works(h) for h in holders], 0.0)
    assert shares.appointment("b", 0.0) == 0.5, "its claim ends after 2 s"


# ---- pages


class Memory:
    """Pages as the model's thread would hold them."""

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.reservations = PageReservations(16, lambda: self.free)

    def take(self, lease: Lease, pages: int) -> None:
        self.free -= pages
        lease.pages_held += pages

    def give_back(self, lease: Lease) -> None:
        self.free = self.free + lease.pages_held
        lease.pages_held = 0


def test_what_is_promised_and_not_free_is_missing_and_pages_on_their_way_back_are_free_once() -> (
    None
):
    memory = Memory(10)
    one = Lease(bytes(16), "p")
    two = Lease(bytes(16), "p")
    memory.reservations.reserve(one, 16 * 8)
    assert memory.reservations.missing == 0
    memory.take(one, 8)
    memory.reservations.reserve(two, 1 + 16 * 8)
    assert memory.reservations.missing == 7
    memory.reservations.release(one)
    assert memory.reservations.missing == 0
    memory.give_back(one)
    assert memory.reservations.missing == 0
    memory.take(two, 9)
    memory.reservations.reserve(two, 16 * 12)
    assert memory.reservations.missing == 2


def test_shared_pages_are_held_without_being_taken() -> None:
    memory = Memory(10)
    one = Lease(bytes(16), "p")
    two = Lease(bytes(16), "p")
    memory.reservations.reserve(one, 16 * 8)
    memory.take(one, 8)
    memory.reservations.reserve(two, 16 * 9)
    two.pages_held = 7  # of them shared with the first
    assert memory.reservations.missing == 0


def test_a_smaller_promise_takes_none_back_unless_it_is_said() -> None:
    memory = Memory(4)
    one = Lease(bytes(16), "p")
    memory.reservations.reserve(one, 16 * 6)
    memory.reservations.reserve(one, 16)
    assert memory.reservations.missing == 2
    memory.reservations.undo(one, 1)
    assert memory.reservations.missing == 0
