"""Reservations of pages: kept, given back, and never counted twice."""

from __future__ import annotations

from cloud_verifier.engine.page_reservations import PageReservations
from cloud_verifier.engine.work import Lease


class Memory:
    """Pages as the model's thread would hold them."""

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.reservations = PageReservations(16, lambda: self.free)

    def take(self, lease: Lease, pages: int) -> None:
        self.free -= pages
        lease.held += pages

    def give_back(self, lease: Lease) -> None:
        self.free, lease.held = self.free + lease.held, 0


def lease(name: int) -> Lease:
    return Lease(bytes([name] * 16), "p")


def test_what_is_promised_and_not_free_is_missing_and_pages_on_their_way_back_are_free_once() -> None:
    memory, one, two = Memory(10), lease(1), lease(2)
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
    memory, one, two = Memory(10), lease(1), lease(2)
    memory.reservations.reserve(one, 16 * 8)
    memory.take(one, 8)
    memory.reservations.reserve(two, 16 * 9)
    two.held = 7  # of them shared with the first
    assert memory.reservations.missing == 0


def test_a_smaller_promise_takes_none_back_unless_it_is_said() -> None:
    memory, one = Memory(4), lease(1)
    memory.reservations.reserve(one, 16 * 6)
    memory.reservations.reserve(one, 16)
    assert memory.reservations.missing == 2
    memory.reservations.undo(one, 1)
    assert memory.reservations.missing == 0
