from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cloud_verifier.engine.work import Lease, ModelFacts
from cloud_verifier.sessions.store import Session, SessionStore
from moa.sampling import SamplingSettings
from moa.wire import Code, History, Limits, Ranges, Refusal
from moa.wire.messages import Open, RecordContract, Verify

FACTS = ModelFacts(
    target="t", tokenizer="k", drafter="d", vocab_size=128, eos_ids=(2,), slots=2, capacity=100, max_positions=100,
    kv_bytes_per_token=64, records=RecordContract(1, 4, ["int8"]),
)  # fmt: skip


class Connection:
    """Keeps nothing of its sessions."""

    def let_go(self, session: Session) -> None:
        """The session has gone."""
        session.owner = None


class World:
    """A store, its clock, and what it has given back."""

    def __init__(self, *, pages: int = 0, **limits: Any) -> None:
        self.now = 0.0
        self.free_pages = pages
        self.released: list[Lease] = []
        self.reasons: list[str] = []
        self.store = SessionStore(
            Limits(**limits),
            dataclasses.replace(FACTS, pages=pages),
            clock=lambda: self.now,
            release=self.released.append,
            evicted=self.reasons.append,
            free_pages=lambda: self.free_pages,
        )

    def session(self, name: int, *, principal: str = "p", ids: list[int] | None = None, live: bool = True) -> Session:
        message = Open(bytes([name] * 16), ids or [name, 5, 6])
        self.store.check_room(message.session, principal)
        made = Session(
            id=message.session, principal=principal, sampling=SamplingSettings(), records="int8",
            record_rate=0, held=Ranges(), ready=Ranges(), used=self.now, owner=Connection() if live else None,
            history=History(message, message.ids, eos_ids=frozenset(), max_context=90),
        )  # fmt: skip
        self.store.ensure_lease(made)
        self.store.add(made)
        return made


def test_a_session_belongs_to_its_principal() -> None:
    world = World()
    one = world.session(1, principal="alice")
    assert world.store.get(one.id, "alice") is one
    with pytest.raises(Refusal) as caught:
        world.store.get(one.id, "mallory")
    with pytest.raises(Refusal) as unknown:
        world.store.get(bytes(16), "mallory")
    assert caught.value.code == unknown.value.code == Code.UNKNOWN_SESSION
    assert str(caught.value) == str(unknown.value), "a stranger does not learn that the session exists"
    assert world.store.find(one.id, "mallory") is None
    assert world.session(1, principal="mallory") is not one, "nor when it opens one of the same id"
    assert world.store.get(one.id, "alice") is one


def test_live_detached_cold_gone() -> None:
    world = World(detached_seconds=10, cold_seconds=100)
    one = world.session(1)
    world.now = 1000.0
    world.store.sweep()
    assert one.state == "live", "a connection keeps a session alive"
    world.store.detach(one)
    world.now += 9
    world.store.sweep()
    assert one.state == "detached"
    world.now += 2
    world.store.sweep()
    assert one.state == "cold"
    assert one.history.epoch == 1
    assert world.store.slots_free == 2
    world.now += 100
    world.store.sweep()
    assert len(world.store) == 0
    assert world.reasons == ["detached_too_long"]


def test_detached_sessions_lose_their_slot_first_and_the_oldest_of_them() -> None:
    world = World(idle_seconds=1)
    live, old = world.session(1), world.session(2, live=False)
    world.now = 5
    world.session(3)
    assert (live.state, old.state) == ("live", "cold")
    assert live.lease is not None
    assert world.released == [lease for lease in world.released if lease.session == old.id]


def test_a_live_session_that_has_paused_is_next_but_never_one_that_works() -> None:
    world = World(idle_seconds=1)
    working, paused = world.session(1), world.session(2)
    working.history.admit(Verify(working.id, 1, 2, [6]))
    world.now = 5
    third = world.session(3)
    assert working.lease is not None
    assert paused.lease is None
    assert third.lease is not None
    third.history.admit(Verify(third.id, 1, 2, [6]))
    with pytest.raises(Refusal) as caught:
        world.session(4)
    assert (caught.value.code, caught.value.limit) == (Code.BUSY, "slots")
    assert caught.value.retry_after_ms > 0


def test_sessions_are_bounded_in_all_and_per_principal() -> None:
    world = World(max_sessions=3, max_sessions_per_principal=2, idle_seconds=1e-9)
    for name in (1, 2):
        world.now += 1
        world.session(name, principal="a")
    with pytest.raises(Refusal) as caught:
        world.session(3, principal="a")
    assert caught.value.limit == "max_sessions_per_principal"
    world.now += 1
    world.session(4, principal="b")
    world.now += 1
    with pytest.raises(Refusal) as caught:
        world.session(5, principal="c")
    assert caught.value.limit == "max_sessions"
    world.store.detach(next(iter(world.store)))
    world.session(6, principal="c")
    assert len(world.store) == 3


def test_a_principal_makes_room_for_itself_by_its_own_old_sessions_only() -> None:
    world = World(max_sessions_per_principal=1, idle_seconds=1e-9)
    world.session(1, principal="a", live=False)
    world.session(2, principal="b", live=False)
    world.now = 1
    world.session(3, principal="a")
    assert [session.id[0] for session in world.store] == [2, 3]


def test_token_logs_have_a_budget_and_cold_ones_go_first() -> None:
    world = World(max_log_bytes=3 * 4096 + 1000, idle_seconds=1e-9)
    one = world.session(1, live=False)
    world.now = 1
    world.session(2, live=False)
    world.store.evict(one, "test")
    world.now = 2
    world.session(3)
    world.now = 3
    world.session(4)
    assert [session.id[0] for session in world.store] == [2, 3, 4]


def test_closing_gives_everything_back() -> None:
    world = World()
    for name in range(50):
        world.store.remove(world.session(name), "closed")
    assert len(world.store) == 0
    assert world.store.slots_free == 2
    assert len(world.released) == 50


def test_a_common_beginning_is_shared_within_a_principal_only() -> None:
    system = list(range(10, 40))
    world = World()
    first = world.session(1, principal="a", ids=[*system, 1])
    second = world.session(2, principal="a", ids=[*system, 2, 3])
    assert second.lease is not None
    assert (second.lease.share, second.lease.share_tokens) == (first.lease, 30)
    other = World()
    other.session(1, principal="a", ids=[*system, 1])
    stranger = other.session(2, principal="b", ids=[*system, 2])
    assert stranger.lease is not None
    assert stranger.lease.share is None


def test_a_beginning_is_never_shared_to_the_last_token() -> None:
    world = World()
    world.session(1, ids=list(range(10, 40)))
    second = world.session(2, ids=list(range(10, 40)))
    assert second.lease is not None
    assert second.lease.share_tokens == 29, "the pending token has not been run"


def test_pages_are_taken_from_whoever_has_been_away_the_longest() -> None:
    world = World(pages=6, idle_seconds=5)
    old, new = world.session(1), world.session(2)
    world.store.make_room(old, 64)
    world.now += 10
    new.used = world.now
    world.store.make_room(new, 32)
    assert world.released == []
    world.store.make_room(new, 80)
    assert [lease.session for lease in world.released] == [old.id]
    assert world.reasons == ["pages_needed"]
    assert old.lease is None


def test_a_session_that_finds_no_pages_is_told_to_come_back() -> None:
    world = World(pages=6, idle_seconds=5)
    one, two = world.session(1), world.session(2)
    world.store.make_room(one, 64)
    with pytest.raises(Refusal) as caught:
        world.store.make_room(two, 64)
    assert (caught.value.code, caught.value.limit) == (Code.BUSY, "kv_tokens")
    assert caught.value.error().retry_after_ms > 0
    world.store.make_room(two, 32)
    assert world.released == [], "what is refused is not kept for it"


def test_ranges_of_records_that_come_between_two_rounds_use_no_budget_up_to_a_number() -> None:
    world = World()
    one = world.session(1, ids=list(range(5, 85)))
    before = world.store.log_bytes
    for runs in (1, 8, 12):
        one.edge_holds([(5 * n, 5 * n + 1) for n in range(runs)])
        world.store.account(one)
        assert one.held.runs == runs
        assert world.store.log_bytes - before == 80 * max(0, runs - 8)
