from __future__ import annotations

import itertools
import math
import threading

import pytest

from cloud_verifier.engine.scheduler import ForwardBatch, Reading, Releases
from cloud_verifier.engine.work import READING, Job
from moa.wire import Code, Limits, Refusal
from moa.wire.messages import Stream
from tests.verifier.virtual import Clock, Machine, chunks, drafts, job, lease, scheduler


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


def test_other_background_work_is_bounded_while_rounds_are_expected_and_is_not_taken_for_their_time() -> None:
    clock = Clock()
    queue, holder = scheduler(clock=clock), lease()
    with queue.background() as piece:
        assert piece.seconds == math.inf
    queue.submit(job(holder))
    for _ in range(40):
        assert len(drafts(queue.next(0))) == 1
        clock.now += 0.01
        queue.submit(job(holder))
        with queue.background() as piece:
            clock.now += 0.04
            piece.ran = True
    assert piece.seconds == pytest.approx(0.0025, rel=0.05)
    queue.next(0)
    clock.now += 1.0
    queue.next(0)
    clock.now += 1.0
    with queue.background() as piece:
        assert piece.seconds == math.inf


def test_background_work_that_found_no_room_leaves_the_wait_of_others_as_it_is() -> None:
    clock = Clock()
    queue, holder = scheduler(clock=clock), lease()
    queue.submit(job(holder))
    assert len(drafts(queue.next(0))) == 1
    clock.now += 0.01
    room = []
    for _ in range(5):
        queue.next(0)
        with queue.background() as piece:
            room.append(piece.seconds)
        clock.now += 0.01
    assert all(later > earlier for earlier, later in itertools.pairwise(room)), "rounds stay away ever longer"
