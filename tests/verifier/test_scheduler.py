from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any

import pytest

from cloud_verifier.forward_time import looks
from cloud_verifier.scheduler import Chunk, ForwardBatch, Reading, Releases, Scheduler
from cloud_verifier.work import READING, Job, Lease
from moa.sampling import SamplingSettings
from moa.wire import Code, Limits, Refusal
from moa.wire.finish import TurnRules
from moa.wire.messages import Stream, Verify

LIMITS = Limits(max_queue=20, max_queue_per_principal=12)
_names = itertools.count()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lease(principal: str = "a", length: int = 4) -> Lease:
    return Lease(next(_names).to_bytes(16), principal, length=length)


def job(holder: Lease, nodes: int = 4, base: int = 4, deadline: float = 1e9) -> Job:
    request = Verify(holder.session, 1, base, [1] * nodes)
    return Job(holder, request, [1] * (base + 1), TurnRules(0, 9, 99), SamplingSettings(), 100.0, deadline)


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(**({"limits": LIMITS, "batch_wait": 0.0, "clock": Clock()} | settings))


def drafts(work: Any) -> list[Job]:
    assert isinstance(work, ForwardBatch)
    return work.jobs


def chunks(work: Any) -> list[Chunk]:
    assert isinstance(work, Reading)
    return work.chunks


def test_everything_ready_goes_in_one_batch() -> None:
    queue = scheduler()
    jobs = [job(lease()) for _ in range(5)]
    for one in jobs:
        queue.submit(one)
    assert queue.queued == 5
    assert drafts(queue.next(0)) == jobs
    assert queue.queued == 0
    assert queue.next(0) is None


def test_a_batch_is_bounded_in_rows_and_tokens() -> None:
    queue = scheduler(max_batch_rows=3, max_batch_tokens=32)
    for nodes in (4, 4, 4, 4, 16, 16, 17):
        queue.submit(job(lease(), nodes))
    assert [[j.cost for j in drafts(queue.next(0))] for _ in range(4)] == [[4, 4, 4], [4, 16], [16], [17]]


def stream(enqueued: float) -> Job:
    one = job(lease())
    one.request, one.enqueued, one.nodes = Stream(one.lease.session, 1, 4), enqueued, 1
    return one


def test_who_has_read_all_that_was_sent_goes_before_who_is_still_reading() -> None:
    queue = scheduler(max_batch_rows=2)
    ahead, behind, new = stream(90.0), stream(91.0), stream(92.0)
    ahead.sent(30, 90.0)
    behind.sent(5, 91.0)
    for one in (ahead, behind, new):
        queue.submit(one)
    assert drafts(queue.next(0)) == [behind, new]
    assert drafts(queue.next(0)) == [ahead], "nobody is idle while there is room"


def test_readers_of_a_full_verifier_are_all_in_time_if_it_is_fast_enough_for_all() -> None:
    """A hundred readers, 12 of them in a forward of 15 ms. The later half gets four tokens a round, the other one: in
    turn the others would get 8 tokens a second, and read 10."""
    clock = Clock()
    queue = scheduler(max_batch_rows=12, clock=clock, limits=Limits(max_queue=200, max_queue_per_principal=200))
    streams = [stream(clock.now) for _ in range(100)]
    early, late, begun, tokens = set(streams[:50]), [0.0], {}, dict.fromkeys(streams, 0)
    waiting = streams[:50]
    for one in waiting:
        queue.submit(one)
    while clock.now < 108.0:
        if clock.now > 101.0 and len(waiting) == 50:
            waiting = streams
            for one in streams[50:]:
                one.enqueued = clock.now
                queue.submit(one)
        work = queue.next(0)
        clock.now += 0.015
        for one in drafts(work):
            late.append(clock.now - begun.setdefault(one, clock.now) - tokens[one] / READING)
            count = 1 if one in early else 4
            tokens[one] += count
            one.enqueued = clock.now
            one.sent(count, clock.now)
            queue.again(one)
    assert max(late) < 0.1


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    queue = scheduler()
    for _ in range(12):
        queue.submit(job(lease("a")))
    with pytest.raises(Refusal) as caught:
        queue.submit(job(lease("a")))
    assert (caught.value.code, caught.value.limit) == (Code.BUSY, "max_queue_per_principal")
    for _ in range(8):
        queue.submit(job(lease("b")))
    with pytest.raises(Refusal) as caught:
        queue.submit(job(lease("c")))
    assert caught.value.limit == "max_queue"
    assert caught.value.error().retry_after_ms > 0
    queue.next(0)
    queue.submit(job(lease("c")))


def test_one_busy_principal_leaves_room_for_another() -> None:
    queue = scheduler(max_batch_rows=2)
    for _ in range(10):
        queue.submit(job(lease("many")))
    queue.next(0)
    queue.submit(job(lease("one")))
    assert sorted(j.lease.principal for j in drafts(queue.next(0))) == ["many", "one"]


def test_principals_share_by_tokens_and_not_by_rounds() -> None:
    queue = scheduler(max_batch_rows=1)
    for _ in range(3):
        queue.submit(job(lease("wide"), nodes=12))
    for _ in range(9):
        queue.submit(job(lease("slim"), nodes=4))
    order = [drafts(queue.next(0))[0].lease.principal for _ in range(8)]
    assert order.count("wide") == 2
    assert order.count("slim") == 6


def test_a_draft_waits_until_its_prompt_has_run() -> None:
    queue = scheduler(prefill_tokens=8)
    holder = lease(length=0)
    queue.submit(job(holder, base=20))
    sizes = []
    while isinstance(work := queue.next(0), Reading):
        (chunk,) = work.chunks
        sizes.append(chunk.size)
        holder.length += chunk.size
        queue.prefilled(holder)
        queue.read()
    assert sizes == [8, 8, 4]
    assert [one.lease for one in drafts(work)] == [holder]


def test_a_piece_of_a_prompt_goes_along_with_every_batch_of_drafts() -> None:
    clock = Clock()
    queue = scheduler(prefill_tokens=256, clock=clock)
    newcomer = lease(length=0)
    queue.prefill(newcomer, [1] * 20000, 19999)
    size = 0
    for turn in range(200):  # forwards take 10 ms, and 0.1 ms more for each token
        nodes = 60 + 8 * (turn % 11)
        queue.submit(job(lease(), nodes=nodes))
        work = queue.next(0)
        assert isinstance(work, ForwardBatch)
        assert len(work.jobs) == 1
        size = sum(chunk.size for chunk in work.chunks)
        newcomer.length += size
        clock.now += 0.01 + 0.0001 * (nodes + size)
        queue.prefilled(newcomer)
    assert 30 <= size <= 45, "a quarter of what the drafts take"


def test_a_prompt_runs_in_large_pieces_when_nobody_drafts_and_in_small_ones_when_rounds_are_about_to_come() -> None:
    clock = Clock()
    queue = scheduler(prefill_tokens=256, clock=clock)
    queue.submit(job(lease()))
    queue.next(0)
    queue.prefill(lease(length=0), [1] * 2000, 1999)
    clock.now += 0.01
    assert queue.next(0) is None, "it waits for the round that is about to come, for as long as it takes itself"
    clock.now += 0.02
    (few,) = chunks(queue.next(0))
    queue.read()
    clock.now += 1.0
    (many,) = chunks(queue.next(0))
    assert few.size < many.size == 256


def test_short_prompts_run_together_within_the_budget() -> None:
    queue = scheduler(prefill_tokens=32)
    for goal in (8, 8, 8, 12, 8):
        queue.prefill(lease(length=0), [1] * 13, goal)
    assert [chunk.size for chunk in chunks(queue.next(0))] == [8, 8, 8, 8]


def test_a_prompt_that_finds_no_memory_gives_its_round_back() -> None:
    queue = scheduler()
    holder = lease(length=0)
    one = job(holder, base=20)
    queue.submit(one)
    assert queue.give_up(holder) is one
    assert queue.give_up(holder) is None
    assert queue.queued == queue.prompts == 0
    assert queue.next(0) is None


def test_expired_and_cancelled_rounds_are_not_run() -> None:
    clock = Clock()
    queue = scheduler(clock=clock)
    late, cancelled, good = job(lease(), deadline=101.0), job(lease()), job(lease())
    for one in (late, cancelled, good):
        queue.submit(one)
    cancelled.cancelled = True
    clock.now = 102.0
    work = queue.next(0)
    assert isinstance(work, ForwardBatch)
    assert (work.jobs, work.expired) == ([good], [late, cancelled])
    assert queue.queued == 0


@pytest.mark.parametrize("length", [0, 4], ids=["parked", "ready"])
def test_a_released_lease_leaves_nothing_behind(length: int) -> None:
    queue = scheduler()
    holder = lease(length=length)
    one = job(holder)
    queue.submit(one)
    assert queue.release(holder) is one
    assert holder.revoked
    assert queue.next(0) == Releases([holder])
    assert queue.next(0) is None
    assert queue.queued == queue.prompts == 0
    queue.again(one)
    assert queue.next(0) is None


def test_releases_come_before_all_work() -> None:
    queue = scheduler()
    queue.submit(job(lease()))
    queue.release(lease())
    assert isinstance(queue.next(0), Releases)


def test_releases_that_come_while_a_batch_waits_for_company_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = scheduler(batch_wait=0.002)
    old, waiting, new = lease(), lease(), lease(length=0)
    for one in (old, waiting):
        queue.submit(job(one))
    assert len(drafts(queue.next(0))) == 2

    def wait(seconds: float) -> None:
        queue.release(old)
        queue.submit(job(new, base=0))  # a prompt of one token has nothing to run before its first round

    monkeypatch.setattr(queue._changed, "wait", wait)
    queue.submit(job(waiting))
    assert queue.next(0) == Releases([old])
    assert {one.lease for one in drafts(queue.next(0))} == {waiting, new}


def test_it_wakes_a_waiting_thread() -> None:
    queue, found = scheduler(), []
    thread = threading.Thread(target=lambda: found.append(queue.next(20)))
    thread.start()
    one = job(lease())
    queue.submit(one)
    thread.join(20)
    assert drafts(found[0]) == [one]
    queue.stop()
    assert queue.next(None) is None


def test_a_batch_waits_a_moment_for_company_but_not_for_nobody() -> None:
    clock = Clock()
    queue = scheduler(clock=clock, batch_wait=5.0)
    first, second = lease(), lease()
    queue.submit(job(first))
    assert len(drafts(queue.next(0))) == 1, "nobody else is there: no wait"
    queue.submit(job(second))
    later = threading.Timer(0.05, lambda: queue.submit(job(first)))
    later.start()
    assert len(drafts(queue.next(0))) == 2
    later.join()


def test_a_batch_waits_for_a_burst_to_its_end_but_not_for_who_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    queue = scheduler(clock=clock, batch_wait=0.002)
    leases = [lease() for _ in range(6)]
    for one in leases:
        queue.submit(job(one))
    assert len(drafts(queue.next(0))) == 6
    clock.now += 0.4  # a slow model: they got their verdicts just now
    assert queue.next(0) is None
    coming = [leases[1], leases[2], leases[3], None, leases[4]]
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.now += 0.001
        if (one := coming.pop(0)) is not None:
            queue.submit(job(one))

    monkeypatch.setattr(queue._changed, "wait", wait)
    queue.submit(job(leases[0]))
    assert len(drafts(queue.next(0))) == 4, "longer than one wait, for they kept coming"
    assert waited == [0.002] * 4
    assert coming == [leases[4]]


def test_waiting_for_company_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    queue = scheduler(clock=clock, batch_wait=0.002)
    leases = [lease() for _ in range(12)]
    for one in leases:
        queue.submit(job(one))
    assert len(drafts(queue.next(0))) == 12
    clock.now += 0.016  # so that 4 ms may be waited
    assert queue.next(0) is None
    coming = iter(leases[1:])

    def wait(seconds: float) -> None:
        clock.now += 0.001
        queue.submit(job(next(coming)))

    monkeypatch.setattr(queue._changed, "wait", wait)
    queue.submit(job(leases[0]))
    assert len(drafts(queue.next(0))) == 5


class Machine:
    """Rounds on a model that takes 5 ms and 1 ms a token; each session asks again 2 ms after its verdict."""

    def __init__(self, sessions: dict[str, int], nodes: int = 1) -> None:
        self.queue, self.clock, self.nodes = Scheduler(Limits(), batch_wait=0.0, clock=(clock := Clock())), clock, nodes
        self.rounds = dict.fromkeys(sessions, 0)
        self.asking = [(clock.now, lease(name)) for name, count in sessions.items() for _ in range(count)]

    def run(self, seconds: float) -> dict[str, int]:
        until = self.clock.now + seconds
        while self.clock.now < until:
            for _, holder in (due := [one for one in self.asking if one[0] <= self.clock.now]):
                self.queue.submit(job(holder, self.nodes))
            self.asking = [one for one in self.asking if one not in due]
            work = self.queue.next(0)
            if work is None:
                self.clock.now = min(at for at, _ in self.asking)
                continue
            ran = drafts(work)
            self.clock.now += 0.005 + 0.001 * sum(one.cost for one in ran)
            for one in ran:
                self.rounds[one.lease.principal] += 1
                self.asking.append((self.clock.now + 0.002, one.lease))
        return self.rounds


@pytest.mark.parametrize("nodes", [1, 8])
def test_one_with_a_single_session_gets_its_share_of_time_beside_one_with_many(nodes: int) -> None:
    alone = Machine({"modest": 1}, nodes).run(5.0)["modest"]
    both = Machine({"modest": 1, "greedy": 48}, nodes).run(5.0)
    assert both["modest"] >= 0.4 * alone
    assert both["greedy"] >= both["modest"]


def test_principals_that_want_the_same_fill_batches_together() -> None:
    both = Machine({"a": 8, "b": 8}).run(2.0)
    one = Machine({"a": 16}).run(2.0)
    assert both["a"] == pytest.approx(both["b"], rel=0.05)
    assert both["a"] + both["b"] >= 0.95 * one["a"]
    many = Machine({str(n): 1 for n in range(32)}).run(2.0)
    assert sum(many.values()) >= 0.95 * Machine({"a": 32}).run(2.0)["a"]


class Reader(Machine):
    """The same, with a model of eight layers to which 3,000 tokens before a token are what many more are to a larger
    one, and with a prompt. Sessions ask again `pause` seconds after a verdict."""

    def __init__(self, sessions: int, *, pause: float = 0.001) -> None:
        super().__init__({"a": sessions}, nodes=8)
        self.queue = Scheduler(Limits(), batch_wait=0.0, pieces=8, clock=self.clock)
        self.pause, self.layers, self.reader = pause, 0, lease(length=0)
        self.verdicts: list[float] = []

    def begin(self, prompt: int) -> None:
        self.queue.prefill(self.reader, [1] * (prompt + 1), prompt)

    def turn(self) -> None:
        now = self.clock.now
        for at, holder in (due := [one for one in self.asking if one[0] <= now]):
            self.clock.now = at
            self.queue.submit(dataclasses.replace(job(holder, self.nodes), enqueued=at))
        self.asking, self.clock.now = [one for one in self.asking if one not in due], now
        match self.queue.next(0):
            case Reading(pieces):
                self.clock.now += self.takes([], pieces) / 8
                self.layers += 1
                if self.layers % 8 == 0:
                    self.grow(pieces)
                    self.queue.read()
            case ForwardBatch(jobs, _, pieces):
                self.clock.now += self.takes(jobs, pieces)
                self.grow(pieces)
                self.verdicts += [self.clock.now - one.enqueued for one in jobs]
                self.asking += [(self.clock.now + self.pause, one.lease) for one in jobs]
            case _:
                self.clock.now += 0.0005

    def takes(self, jobs: list[Job], pieces: list[Chunk]) -> float:
        rows = [*((one.cost, one.lease.length) for one in jobs), *((one.size, one.lease.length) for one in pieces)]
        return 0.005 + 0.0003 * sum(size for size, _ in rows) + 2e-7 * looks(rows)

    def grow(self, pieces: list[Chunk]) -> None:
        for piece in pieces:
            piece.lease.length += piece.size
            self.queue.prefilled(piece.lease)

    def p95(self) -> float:
        return sorted(self.verdicts)[int(0.95 * len(self.verdicts))] if self.verdicts else 0.0


@pytest.mark.parametrize(
    ("sessions", "pause", "seconds"),
    [(0, 0, 3), (1, 0.001, 40), (1, 0.02, 6), (1, 0.06, 5), (4, 0.02, 8), (16, 0.002, 15)],
)
def test_a_long_prompt_is_read_and_costs_verdicts_a_third_at_most(sessions: int, pause: float, seconds: float) -> None:
    """A token at its end takes three times as long as at its beginning, and to fetch what it looks at as long as a
    round: neither fits beside one."""
    machine = Reader(sessions, pause=pause)
    while len(machine.verdicts) < 200 * (sessions > 0):
        machine.turn()
    alone, machine.verdicts = machine.p95(), []
    began = machine.clock.now
    machine.begin(3000)
    while machine.reader.length < 3000:
        machine.turn()
    assert machine.clock.now < began + seconds
    assert machine.p95() <= 1.3 * alone
    assert max(machine.verdicts, default=0.0) <= 2 * alone


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    machine, short = Reader(0), lease(length=0)
    machine.begin(3000)
    while machine.reader.length < 1000:
        machine.turn()
    machine.queue.prefill(short, [1] * 65, 64)
    until = machine.clock.now + 1.0
    while short.length < 64:
        machine.turn()
    assert machine.clock.now < until
    assert machine.reader.length < 2000


def test_what_is_read_is_dropped_with_its_session() -> None:
    queue = scheduler(pieces=2)
    gone, left = lease(length=0), lease(length=0)
    for one in (gone, left):
        queue.prefill(one, [1] * 9, 8)
    assert [one.lease for one in chunks(queue.next(0))] == [gone, left]
    queue.release(gone)
    assert queue.next(0) == Releases([gone])
    queue.read()
    assert [one.lease for one in chunks(queue.next(0))] == [left]


def test_a_large_piece_is_chosen_again_when_rounds_come() -> None:
    clock = Clock()
    queue, holder, reader = scheduler(pieces=8, clock=clock), lease(), lease(length=0)
    queue.prefill(reader, [1] * 8001, 8000)
    (large,) = chunks(queue.next(0))
    clock.now += 0.01  # a layer
    queue.submit(job(holder))
    assert [one.lease for one in drafts(queue.next(0))] == [holder]
    clock.now += 0.006
    queue.submit(job(holder))
    while not isinstance(work := queue.next(0), Reading):
        clock.now += 0.006
        queue.submit(job(holder))
    assert work.chunks[0].size < large.size == 256
