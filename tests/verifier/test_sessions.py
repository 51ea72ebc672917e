from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cloud_verifier.engine.job import Lease
from cloud_verifier.engine.loop import Workload
from cloud_verifier.engine.schedule import Scheduler
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.channel import Channel, answer_hello
from cloud_verifier.sessions.outbox import CloseConnection
from cloud_verifier.sessions.service import Service
from cloud_verifier.sessions.session import ServerSession, sampling_settings
from cloud_verifier.sessions.table import SessionTable
from moa import demo
from moa.api.access import ANONYMOUS
from moa.errors import MoaError
from moa.grammar.children import Children
from moa.grammar.matcher import MATCHER_BYTES, GrammarCompiler, Matcher
from moa.grammar.spec import Grammar
from moa.wire import FEATURES, Code, Limits, Refusal, encode
from moa.wire.messages import (
    Append,
    ChatMessage,
    Hello,
    Open,
    Sampling,
    Welcome,
)
from tests.verifier.sessions import FACTS, LIMITS, outbox, session, works


class World:
    """A table, its clock, and what it has given back."""

    def __init__(self, *, pages: int = 0, **limits: Any) -> None:
        self.now = 0.0
        self.free_pages = pages
        self.released: list[Lease] = []
        self.reasons: list[str] = []
        self.table = SessionTable(
            Limits(**limits),
            dataclasses.replace(FACTS, pages=pages),
            clock=lambda: self.now,
            release=self.released.append,
            evicted=self.reasons.append,
            free_pages=lambda: self.free_pages,
        )

    def session(
        self, name: int, *, principal: str = "p", ids: list[int] | None = None, live: bool = True
    ) -> ServerSession:
        made = session(name, principal=principal, ids=ids or [name, 5, 6], live=live, now=self.now)
        self.table.check_room(made)
        self.table.reserve(made)
        self.table.add(made)
        return made


def refused(call: Callable[[], Any], limit: str = "", code: Code = Code.BUSY) -> Refusal:
    """The refusal of a call, which names this limit and, where it is for now, when to come back."""
    with pytest.raises(Refusal) as caught:
        call()
    assert (caught.value.code, caught.value.limit) == (code, limit)
    assert (caught.value.retry_after_ms > 0) == (code == Code.BUSY)
    return caught.value


def test_a_session_belongs_to_its_principal() -> None:
    world = World()
    one = world.session(1, principal="alice")
    mine = outbox()
    one.attach(mine)
    assert world.table.attached(one.id, "alice", mine) is one
    known, unknown = (
        refused(lambda id=id: world.table.attached(id, "mallory", mine), code=Code.UNKNOWN_SESSION)  # type: ignore[misc]
        for id in (one.id, bytes(16))
    )
    assert str(known) == str(unknown), "a stranger does not learn that the session exists"
    assert world.table.find(one.id, "mallory") is None
    assert world.session(1, principal="mallory") is not one, "nor when it opens one of the same id"
    assert world.table.attached(one.id, "alice", mine) is one


def test_live_detached_cold_gone() -> None:
    world = World(detached_seconds=10, cold_seconds=100)
    one = world.session(1)
    world.now = 1000.0
    world.table.sweep()
    assert one.state == "live", "a connection keeps a session alive"
    one.detach()
    one.used = world.now
    world.now += 9
    world.table.sweep()
    assert one.state == "detached"
    world.now += 2
    world.table.sweep()
    assert one.state == "cold"
    assert one.records.epoch == 1
    assert world.table.slots_free == 2
    world.now += 100
    world.table.sweep()
    assert len(world.table) == 0
    assert world.reasons == ["detached_too_long"]


def test_a_live_session_that_has_paused_is_next_but_never_one_that_works() -> None:
    world = World(idle_seconds=1)
    working = world.session(1)
    paused = world.session(2)
    works(working)
    world.now = 5
    third = world.session(3)
    assert working.lease is not None
    assert working.as_job(working.lease, 5.0).deadline == 5.0 + LIMITS.request_seconds
    assert paused.lease is None
    assert third.lease is not None
    works(third)
    refused(lambda: world.session(4), "slots")


def test_a_greedy_principal_passes_a_slot_on_between_two_rounds() -> None:
    world = World(idle_seconds=1000)
    holders = [works(world.session(name, principal="greedy")) for name in (1, 2)]
    refused(lambda: world.session(3, principal="modest"), "slots")
    holders[0].give_up()
    world.table.pass_on(holders[0])
    assert world.reasons == ["fair_share"]
    assert world.session(3, principal="modest").lease is not None
    world.table.pass_on(holders[1])
    assert holders[1].lease is not None


def test_sessions_are_bounded_in_all_and_per_principal() -> None:
    world = World(max_sessions=3, max_sessions_per_principal=2, idle_seconds=1e-9)
    for name in (1, 2):
        world.now += 1
        world.session(name, principal="a")
    refused(lambda: world.session(3, principal="a"), "max_sessions_per_principal")
    world.now += 1
    world.session(4, principal="b")
    world.now += 1
    refused(lambda: world.session(5, principal="c"), "max_sessions")
    next(iter(world.table)).detach()
    world.session(6, principal="c")
    assert len(world.table) == 3


def test_a_principal_makes_room_for_itself_by_its_own_old_sessions_only() -> None:
    world = World(max_sessions_per_principal=1, idle_seconds=1e-9)
    world.session(1, principal="a", live=False)
    world.session(2, principal="b", live=False)
    world.now = 1
    world.session(3, principal="a")
    assert [session.id[0] for session in world.table] == [2, 3]


def test_token_logs_have_a_budget_and_cold_ones_go_first() -> None:
    world = World(max_log_bytes=3 * 4096 + 1000, idle_seconds=1e-9)
    one = world.session(1, live=False)
    world.now = 1
    world.session(2, live=False)
    world.table.evict(one, "test")
    world.now = 2
    world.session(3)
    world.now = 3
    world.session(4)
    assert [session.id[0] for session in world.table] == [2, 3, 4]


def test_token_logs_that_grow_are_bounded_too() -> None:
    world = World(max_log_bytes=2 * 4096 + 60 * 40)
    one = world.session(1, ids=[5] * 20)
    two = world.session(2, ids=[6] * 20)
    one.log += [7] * 20
    world.table.account(one)
    refused(lambda: world.table.reserve(works(one)), "max_log_bytes")
    world.table.remove(two, "closed")
    world.table.reserve(one)
    assert world.table.log_bytes == one.counted == one.log_bytes


def test_a_common_beginning_is_shared_within_a_principal_only() -> None:
    system = list(range(10, 40))
    world = World()
    first = world.session(1, principal="a", ids=[*system, 1])
    second = world.session(2, principal="a", ids=[*system, 2, 3])
    assert second.lease is not None
    assert (second.lease.share, second.lease.share_tokens) == (first.lease, 30)
    other = World()
    other.session(1, principal="a", ids=system)
    stranger = other.session(2, principal="b", ids=system)
    assert stranger.lease is not None
    assert stranger.lease.share is None
    other.table.remove(stranger, "closed")
    alike = other.session(3, principal="a", ids=system)
    assert alike.lease is not None
    assert alike.lease.share_tokens == 29, "the pending token has not been run"


def test_pages_are_taken_from_whoever_has_been_away_the_longest() -> None:
    world = World(pages=6, idle_seconds=5)
    old = world.session(1, ids=[5] * 65)
    new = world.session(2, ids=[6] * 33)
    world.now += 10
    new.used = world.now
    assert world.released == []
    new.log += [7] * 48
    world.table.reserve(new)
    assert [lease.session for lease in world.released] == [old.id]
    assert world.reasons == ["pages_needed"]
    assert old.lease is None


def test_a_session_that_finds_no_pages_is_told_to_come_back() -> None:
    world = World(pages=6, idle_seconds=5)
    world.session(1, ids=[5] * 65)
    two = world.session(2)
    two.log += [7] * 60
    refused(lambda: world.table.reserve(two), "kv_tokens")
    del two.log[33:]
    world.table.reserve(two)
    assert world.released == [], "what is refused is not kept for it"
    world.table.remove(two, "closed")
    refused(lambda: world.session(3, ids=[6] * 65), "kv_tokens")
    assert world.table.slots_free == 1, "it leaves the slot to others"


def test_ranges_of_records_that_come_between_two_rounds_use_no_budget_up_to_a_number() -> None:
    world = World()
    one = world.session(1, ids=list(range(5, 85)))
    before = world.table.log_bytes
    for runs in (1, 8, 12):
        one.want_records("int8", 0, [(5 * n, 5 * n + 1) for n in range(runs)], FEATURES)
        world.table.account(one)
        assert one.records.held.runs == runs
        assert world.table.log_bytes - before == 80 * max(0, runs - 8)
    one.want_records("int8", 0, [(2 * n, 2 * n + 1) for n in range(4000)], FEATURES)
    assert one.records.held.runs == 40, "only rows of the log count"


@pytest.mark.parametrize("temperature", [5e-324, 1e-9, float("nan"), float("inf"), -1.0, 1e308])
def test_a_temperature_that_leaves_the_range_of_numbers_is_refused(temperature: float) -> None:
    with pytest.raises(Refusal, match="temperature") as caught:
        sampling_settings(Sampling(temperature=temperature, top_p=0.9), None)
    assert caught.value.code == Code.BAD_MESSAGE


@pytest.mark.parametrize(
    ("code", "hello"),
    [
        (Code.VERSION, Hello([1], [])),
        (Code.TOKENIZER, Hello([3], [], tokenizer="another")),
        (Code.TARGET, Hello([3], [], target="another")),
        ("", Hello([7, 3], ["records"], drafter="d")),
        ("drafter_mismatch", Hello([3], ["records"], drafter="another")),
        (None, Hello([3], [], drafter="another")),
    ],
)
def test_a_hello_is_welcome_refused_or_told_that_no_records_fit(
    code: str | None, hello: Hello
) -> None:
    def answer() -> Welcome:
        return answer_hello(hello, FACTS, Limits(), max_context=90, instance="i")

    if isinstance(code, Code):
        refused(answer, code=code)
        return
    welcome = answer()
    assert (welcome.version, welcome.vocab_size, welcome.limits.max_context_tokens) == (3, 128, 90)
    assert [notice.partition(":")[0] for notice in welcome.notices] == ([code] if code else []), (
        "no other needs one"
    )
    assert (welcome.records == FACTS.records) == ("records" in welcome.features) == (code == "")


def test_what_follows_a_grammar_counts_as_memory() -> None:
    world = World()
    read = (demo.paths().tokenizer / "tokenizer.json").read_text
    compiled = GrammarCompiler(read, size=4096, eos_ids=[4]).compile(Grammar("regex", "yes|no"))
    one = world.session(1)
    before = world.table.log_bytes
    one.matcher = compiled.matcher(len(one.log))
    world.table.account(one)
    assert world.table.log_bytes - before == MATCHER_BYTES
    world.table.remove(one, "closed")
    assert world.table.log_bytes == 0


async def test_grammars_of_one_principal_are_compiled_one_after_another() -> None:
    compiler = GrammarCompiler(
        (demo.paths().tokenizer / "tokenizer.json").read_text, size=4096, eos_ids=[0]
    )
    service = Service(
        FACTS,
        Limits(max_tree_nodes=8),
        Workload(Scheduler(Limits())),
        grammars=compiler,
    )
    done: list[str] = []

    async def ask(principal: str, number: int) -> None:
        await service.matcher(principal, Grammar("regex", f"{principal}{number}"), 0, [])
        done.append(principal)

    await asyncio.gather(*(ask(f"other {number}", number) for number in range(4)))  # it has started
    done.clear()
    await asyncio.gather(*(ask("many", number) for number in range(30)), ask("one", 0))
    assert done.index("one") < 15


async def test_no_session_opens_once_its_token_was_revoked() -> None:
    """Its grammar is compiled meanwhile. Nobody could come back for it: it would keep its slot."""
    compiling, go = asyncio.Event(), asyncio.Event()

    class Slow(GrammarCompiler):
        async def matcher(self, grammar: Grammar, start: int, log: Sequence[int] = ()) -> Matcher:
            compiling.set()
            await go.wait()
            return await super().matcher(grammar, start, log)

    read = (demo.paths().tokenizer / "tokenizer.json").read_text
    service = Service(
        dataclasses.replace(FACTS, grammars=True),
        LIMITS,
        Workload(Scheduler(LIMITS)),
        grammars=Slow(read, size=4096, eos_ids=[0]),
    )
    channel = Channel(service, "alice", Meter(LIMITS, 0.0))
    await channel.receive(encode(Hello([3], ["grammar"])), 0.0)
    opening = Open(bytes(16), [4, 5, 6], grammar=Grammar("regex", "yes"))
    asked = asyncio.create_task(channel.receive(encode(opening), 0.0))
    await compiling.wait()
    channel.revoked()
    service.end_sessions_but_of(lambda principal: False)
    go.set()
    with pytest.raises(CloseConnection, match="revoked"):
        await asked
    assert (list(service.table), service.table.slots_free) == ([], FACTS.slots)


@pytest.mark.parametrize(("principal", "whose"), [(ANONYMOUS, ""), ("alice", "your key")])
def test_a_refusal_speaks_of_a_key_only_to_who_has_one(principal: str, whose: str) -> None:
    limits = Limits(
        max_connections_per_principal=1,
        max_sessions_per_principal=1,
        max_tokens_per_second=1.0,
        max_burst_tokens=8,
    )
    service = Service(FACTS, limits, Workload(Scheduler(limits)), clock=lambda: 0.0)
    service.join(outbox(), principal)
    words = [str(service.no_room(principal))]
    session = service.open(Open(bytes(16), [4, 5, 6]), principal, FEATURES)
    session.attach(outbox())
    opening = Open(bytes([1] * 16), [4, 5])
    limit = "max_sessions_per_principal"
    words.append(str(refused(lambda: service.open(opening, principal, FEATURES), limit)))
    words.append(str(refused(lambda: service.admit(principal, 8), "max_tokens_per_second")))
    assert ["your key" in said for said in words] == [bool(whose)] * 3, words
    assert words[1].startswith(f"1 session{whose and ' of ' + whose} is open")


async def test_a_grammar_without_a_process_is_refused_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: object) -> None:
        raise MoaError("no process to compile a grammar in: Too many open files")

    read = (demo.paths().tokenizer / "tokenizer.json").read_text
    compiler = GrammarCompiler(read, size=4096, eos_ids=[0])
    service = Service(
        FACTS,
        Limits(max_tree_nodes=8),
        Workload(Scheduler(Limits())),
        grammars=compiler,
    )
    with monkeypatch.context() as patch:
        patch.setattr(Children, "check", nothing)
        with pytest.raises(Refusal) as refused:
            await service.matcher("one", Grammar("regex", "yes"), 0, [])
    assert (refused.value.code, refused.value.retryable) == (Code.BUSY, True)
    await service.matcher("one", Grammar("regex", "yes"), 0, [])


def test_an_identity_of_an_older_version_is_told_and_not_compared() -> None:
    old = "3e5d19dd17fcdb686f194a59c9ea17d74beac8cbae758cee72887a8ab521fef1"
    facts = dataclasses.replace(FACTS, target="v2-" + old, drafter="v2-" + old, computes="v2-c")
    hello = Hello([3], ["records"], target=old, drafter=old)
    welcome = answer_hello(hello, facts, Limits(), max_context=90, instance="i")
    told = [notice.partition(":")[0] for notice in welcome.notices]
    assert told == ["old_identity", "drafter_mismatch"]
    assert all("bundle" in notice for notice in welcome.notices)
    assert (welcome.records, welcome.computes) == (None, "v2-c")
    refused(
        lambda: answer_hello(
            Hello([3], [], target="v2-" + old[::-1]), facts, Limits(), max_context=90, instance="i"
        ),
        code=Code.TARGET,
    )


def test_messages_are_kept_and_counted_only_where_they_were_agreed() -> None:
    told = [ChatMessage("user", "x" * 1000)]
    for features in (FEATURES, FEATURES - {"messages"}):
        agreed = "messages" in features
        made = ServerSession(
            Open(bytes(16), [4, 5], messages=told),
            LIMITS,
            eos_ids=frozenset(),
            max_context=90,
            features=features,
        )
        assert list(made.messages) == (told if agreed else [])
        assert made.log_bytes > 4 * 1000 or not agreed
        before = made.log_bytes
        made.append(Append(bytes(16), 2, [6], messages=[*told, *told]))
        assert len(made.messages) == 2 * agreed
        assert (made.log_bytes - before > 4 * 1000) == agreed


def test_messages_are_agreed_with_a_verifier_that_takes_them() -> None:
    hello = Hello([3], sorted(FEATURES))
    for takes in (False, True):
        facts = dataclasses.replace(FACTS, takes_messages=takes)
        welcome = answer_hello(hello, facts, LIMITS, max_context=90, instance="i")
        assert ("messages" in welcome.features) == takes
