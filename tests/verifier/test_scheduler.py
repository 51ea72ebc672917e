from __future__ import annotations

import threading
from collections import Counter
from statistics import median

import pytest

from cloud_verifier.engine.job import READING_SPEED, Guesses, Job
from cloud_verifier.engine.loop import Workload
from cloud_verifier.engine.queue import RoundQueue
from cloud_verifier.engine.schedule import EngineStep, Scheduler, StepOutcome
from moa.speculation.cost import Cost
from moa.wire import Code, Limits, Refusal
from moa.wire.messages import Stream
from tests.verifier.virtual import LIMITS, Clock, Crowd, Machine, Timed, drafts, job, lease, pieces


def test_a_batch_is_bounded_in_rows_and_tokens() -> None:
    queue = Timed(max_batch_rows=3, max_batch_tokens=32)
    for nodes in (4, 4, 4, 4, 16, 16, 17):
        queue.submit(job(lease(), nodes))
    assert [[j.cost for j in drafts(queue.next())] for _ in range(4)] == [
        [4, 4, 4],
        [4, 16],
        [16],
        [17],
    ]


def stream(enqueued: float) -> Job:
    one = job(lease())
    one.request = Stream(one.lease.session, 1, 4)
    one.enqueued = enqueued
    one.cost = 1
    return one


def test_readers_of_a_full_verifier_are_all_in_time_if_it_is_fast_enough_for_all() -> None:
    """A hundred readers, 12 of them in a forward of 15 ms. The later half gets four tokens a round,
    the other one: in turn the others would get 8 tokens a second, and read 10."""
    clock = Clock()
    queue = Timed(
        clock, max_batch_rows=12, limits=Limits(max_queue=200, max_queue_per_principal=200)
    )
    streams = [stream(clock.now) for _ in range(100)]
    early = set(streams[:50])
    late = [0.0]
    begun = {}
    tokens = dict.fromkeys(streams, 0)
    waiting = streams[:50]
    queue.submit(*waiting)
    while clock.now < 108.0:
        if clock.now > 101.0 and len(waiting) == 50:
            waiting = streams
            for one in streams[50:]:
                one.enqueued = clock.now
                queue.submit(one)
        work = queue.next()
        clock.now += 0.015
        for one in drafts(work):
            late.append(clock.now - begun.setdefault(one, clock.now) - tokens[one] / READING_SPEED)
            count = 1 if one in early else 4
            tokens[one] += count
            one.enqueued = clock.now
            one.sent(count, clock.now)
            queue.outcome.run_again.append(one)
    assert max(late) < 0.1


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    queue = Timed()
    queue.submit(*(job(lease("a")) for _ in range(12)))
    with pytest.raises(Refusal) as caught:
        queue.submit(job(lease("a")))
    assert (caught.value.code, caught.value.limit) == (Code.BUSY, "max_queue_per_principal")
    queue.submit(*(job(lease("b")) for _ in range(8)))
    with pytest.raises(Refusal) as caught:
        queue.submit(job(lease("c")))
    assert caught.value.limit == "max_queue"
    assert caught.value.error().retry_after_ms > 0
    queue.next()
    queue.submit(job(lease("c")))


def test_who_was_served_waits_for_many_that_were_not_as_for_one() -> None:
    queue = RoundQueue(Limits(), max_rows=1, max_tokens=2048)
    seconds = 0.0
    crowd = [f"idle {number}" for number in range(50)]
    queue.charge(dict.fromkeys(crowd, 0.0), 0.01)
    for _ in range(1000):
        queue.charge({"busy": 0.01}, 0.01)
    for name in [*crowd, "busy"]:
        queue.admit(one := job(lease(name)))
    while True:
        ((one,), _) = queue.take(0.0, {}, {}, Cost(0.01), 0.0)
        if one.lease.principal == "busy":
            break
        queue.run_again(one)
        queue.charge({one.lease.principal: 0.01}, 0.01)
        seconds += 0.01
    assert seconds < 1.5, (
        "each is served twice; to catch up with a quarter of a second takes each 25 times"
    )


def test_who_has_one_round_and_many_prompts_does_not_keep_the_forwards_of_others_short() -> None:
    def rows(prompts: dict[str, int]) -> int:
        queue = RoundQueue(Limits(), max_rows=64, max_tokens=2048)
        for name in ["flood"] + ["crowd"] * 12:
            queue.admit(job(lease(name)))
        jobs, _ = queue.take(0.0, {}, prompts, Cost(0.01), 0.0)
        return len(jobs)

    assert rows({"flood": 900}) == 13
    assert rows({}) < 8, "a neighbour with one round alone is spared"


def test_how_soon_a_principal_comes_back_outlasts_newcomers() -> None:
    queue = RoundQueue(Limits(), max_rows=8, max_tokens=2048)
    for name in ("first", "second"):
        queue.came_back(lease(name), 0.002)
    for number in range(3):
        queue.admit(one := job(lease(f"newcomer {number}")))
        queue.charge({one.lease.principal: 0.1}, 0.01)
    assert queue.owed() == {"first": 0.002, "second": 0.002}
    queue.forget({"first"})
    assert queue.owed() == {"first": 0.002}, "the second has no session any more"


def test_short_prompts_run_together_within_the_budget() -> None:
    queue = Timed(prefill_tokens=32)
    for goal in (8, 8, 8, 12, 8):
        queue.scheduler.prefill(lease(length=0), [1] * 13, goal)
    assert [piece.size for piece in pieces(queue.next())] == [8, 8, 8, 8]


@pytest.mark.parametrize("length", [0, 4], ids=["parked", "ready"])
def test_a_released_lease_leaves_nothing_behind(length: int) -> None:
    queue = Timed()
    holder = lease(length=length)
    one = job(holder)
    queue.submit(one)
    assert queue.scheduler.holds(one)
    queue.scheduler.release(holder)
    assert not queue.scheduler.holds(one)
    assert holder.revoked
    step = queue.taken()
    assert step.releases == [holder]
    queue.outcome.run_again = [one]
    assert queue.next() is None
    assert not queue.scheduler.queued
    assert not queue.scheduler._prompts


def test_who_begins_with_what_is_released_is_served_before() -> None:
    queue = Timed()
    source = lease(length=40)
    source.slot = 0
    heir = lease(length=0)
    heir.share = source
    heir.share_tokens = 30
    stranger = lease(length=0)
    for one in (heir, stranger):
        queue.scheduler.prefill(one, [1] * 41, 40)
    queue.scheduler.release(source)
    step = queue.taken()
    assert (step.releases, step.heirs) == ([source], [heir])
    assert heir.start == 30, "revoked, but its slot holds the tokens still"
    source.slot = None
    assert heir.start == 0


def test_releases_that_come_while_a_batch_waits_for_company_go_first() -> None:
    queue = Timed(batch_wait=0.002)
    old = lease()
    waiting = lease()
    new = lease(length=0)
    queue.submit(job(old), job(waiting))
    assert len(drafts(queue.next())) == 2
    queue.submit(job(waiting))
    assert queue.next() is None
    assert queue.wait == pytest.approx(0.002)
    queue.scheduler.release(old)
    queue.submit(
        job(new, base=0)
    )  # a prompt of one token has nothing to run before its first round
    step = queue.taken()
    assert step.releases == [old]
    assert {one.lease for one in drafts(queue.next())} == {waiting, new}


def test_it_wakes_a_waiting_thread() -> None:
    work = Workload(Scheduler(LIMITS, batch_wait=0.0))
    found = []
    thread = threading.Thread(target=lambda: found.append(work.next(20)))
    thread.start()
    one = job(lease())
    work.submit(one)
    thread.join(20)
    assert drafts(found[0]) == [one]
    work.stop()
    assert work.next(20) is None


def test_a_batch_waits_for_a_burst_to_its_end_but_not_for_who_stays_away() -> None:
    queue = Timed(batch_wait=0.002)
    leases = [lease() for _ in range(6)]
    queue.submit(*map(job, leases))
    assert len(drafts(queue.next())) == 6
    queue.clock.now += 0.4  # a slow model: they got their verdicts just now
    assert queue.next() is None
    for one in leases[:4]:
        queue.submit(job(one))
        assert queue.next() is None
        assert queue.wait == pytest.approx(0.002)
        queue.clock.now += 0.0015
    queue.clock.now += 0.001
    assert len(drafts(queue.next())) == 4, "longer than one wait, for they kept coming"


def only_wait(queue: Timed) -> None:
    """The latest rounds have run and want another forward, for which their devices have sent no
    guess yet."""
    assert queue.step is not None
    ran = queue.step.jobs
    queue.outcome.run_again = ran
    assert drafts(queue.next()) == ran
    queue.outcome.left_out = [one.lease for one in ran]
    queue.finish()
    queue.step = None


def test_a_batch_waits_for_a_burst_although_its_streams_have_just_been_found_to_wait() -> None:
    queue = Timed(batch_wait=0.002)
    leases = [lease() for _ in range(6)]
    queue.submit(*map(job, leases))
    queue.taken()
    queue.clock.now += 0.4
    only_wait(queue)
    for one in leases[:4]:
        queue.submit(job(one))
        assert queue.next() is None, "the latest forward has taken 0.4 s, not none"
        queue.clock.now += 0.0015
    queue.clock.now += 0.001
    assert len(drafts(queue.next())) == 4


def test_streams_that_only_wait_make_no_forward_seem_short() -> None:
    """Or too few guesses were verified, because one more seemed to make a forward longer."""
    queue = Timed()
    leases = [lease() for _ in range(6)]
    for _ in range(4):
        queue.submit(*(job(one, nodes=7) for one in leases))
        queue.taken()
        queue.clock.now += 0.12
        only_wait(queue)
    assert queue.scheduler._cost.seconds(42) == pytest.approx(0.12)


def test_waiting_for_company_has_an_end() -> None:
    queue = Timed(batch_wait=0.002)
    leases = [lease() for _ in range(12)]
    queue.submit(*map(job, leases))
    assert len(drafts(queue.next())) == 12
    queue.clock.now += 0.016  # so that 4 ms may be waited
    for one in leases[:4]:
        queue.submit(job(one))
        assert queue.next() is None
        queue.clock.now += 0.0011
    queue.submit(job(leases[4]))
    assert len(drafts(queue.next())) == 5


FLOODS = {
    "drafted streams": (48, 8, 18, {"drafted": "greedy"}),
    "wide drafts": (24, 30, 35, {}),
    "narrow drafts": (24, 1, 3, {}),
    "new sessions": (4, 8, 38, {"drafted": "greedy", "brief": "greedy"}),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_neighbour_beside_a_flood_waits_half_as_long_again_at_the_median(flood: str) -> None:
    """Its rounds have no drafts of others beside them, few of their prompts, and it is waited for:
    a flood has its half of the time in forwards of its own."""
    sessions, nodes, milliseconds, settings = FLOODS[flood]
    alone = Machine({"modest": 1}, batch_wait=0.0015)
    beside = Machine(
        {"modest": 1, "greedy": sessions},
        {"modest": 1, "greedy": nodes},
        batch_wait=0.0015,
        **settings,
    )
    rounds = alone.run(4.0)["modest"]
    both = beside.run(4.0)
    assert median(beside.seconds["modest"][10:]) <= 1.5 * median(alone.seconds["modest"])
    assert both["modest"] >= 0.4 * rounds
    assert both["greedy"] * milliseconds >= 1000, "it is not starved"


def test_new_sessions_of_who_asks_for_little_do_not_wait_for_the_rounds_of_who_asks_for_much() -> (
    None
):
    """They had 20 answers instead of 117: their prompts went along in pieces of a few tokens."""
    settings = {"batch_wait": 0.0015, "brief": "modest"}
    alone = Machine({"modest": 1}, **settings).run(6.0)
    beside = Machine({"modest": 1, "greedy": 24}, {"modest": 1, "greedy": 8}, **settings).run(6.0)
    assert beside["modest"] >= 0.5 * alone["modest"]
    assert beside["greedy"] >= 300, "it is not starved"


def measured(rude: int = 10) -> Timed:
    """A scheduler that knows what forwards of up to 256 tokens take, 5 ms and 0.1 ms a token, and
    has run so many rounds of a principal "rude", of 40 tokens."""
    queue = Timed()
    for _ in range(4):
        one = lease("rude", length=0)
        queue.scheduler.prefill(one, [1] * 257, 256)
        while one.length < 256:
            read(queue, queue.taken())
    for _ in range(rude):
        queue.submit(job(lease("rude"), nodes=40))
        read(queue, queue.taken())
    return queue


def read(queue: Timed, step: EngineStep) -> None:
    """Run a step."""
    tokens = sum(one.cost for one in step.jobs) + sum(piece.size for piece in step.prefill)
    queue.clock.now += 0.005 + 0.0001 * tokens
    for piece in step.prefill:
        piece.lease.length += piece.size
    queue.finish()


def sizes(step: EngineStep) -> dict[str, int]:
    """Tokens of prompts in a step, by principal."""
    found: Counter[str] = Counter()
    for piece in step.prefill:
        found[piece.lease.principal] += piece.size
    return found


def test_a_prompt_that_is_owed_runs_whole_where_it_is_known_what_so_many_tokens_take() -> None:
    """It went in three pieces, of 8, 16 and 24 tokens: each at most twice as long as the one before
    in a forward with rounds, also where longer ones had run without. One that is not owed does."""
    queue = measured()
    queue.submit(job(lease("rude", length=0), base=48), job(lease("rude"), nodes=40))
    assert sizes(queue.taken()) == {"rude": 8}
    queue = measured()
    queue.submit(job(lease("honest", length=0), base=48), job(lease("rude"), nodes=40))
    step = queue.taken()
    assert len(step.jobs) == 1
    assert sizes(step) == {"honest": 48}


def test_drafts_of_rounds_count_where_a_prompt_that_is_owed_may_take_as_long_as_they_do() -> None:
    """10 ms of drafts and 6 ms of a forward: without the drafts it would be 97 tokens."""
    queue = measured()
    for _ in range(3):
        queue.submit(drafted := job(lease("rude"), nodes=8))
        drafted.guesses = Guesses(waits=False)
        step = queue.taken()
        queue.outcome.extra_seconds = 0.01
        queue.clock.now += 0.01
        read(queue, step)
    queue.submit(job(lease("honest", length=0), base=140), job(lease("rude"), nodes=8))
    assert sizes(queue.taken()) == {"honest": 140}


def test_prompts_of_others_make_no_forward_longer_in_which_one_is_owed_its_place() -> None:
    queue = measured()
    rude = [job(lease("rude", length=0), base=30) for _ in range(3)]
    queue.submit(*rude, job(lease("honest", length=0), base=30), job(lease("rude"), nodes=40))
    assert sizes(queue.taken()) == {"honest": 30}


def test_a_prompt_that_is_owed_does_not_wait_for_rounds_of_others_that_are_about_to_come() -> None:
    queue = measured()
    queue.scheduler.prefill(lease("honest", length=0), [1] * 41, 40)
    queue.scheduler.prefill(lease("rude", length=0), [1] * 31, 30)
    assert sizes(queue.taken()) == {"honest": 40}
    queue = measured()
    queue.scheduler.prefill(lease("rude", length=0), [1] * 31, 30)
    assert queue.next() is None, "one of their own does"


def test_without_rounds_each_principal_has_as_many_tokens_of_prompts_as_who_goes_first() -> None:
    """Who asks for little waited for 256 tokens of who asks for much."""
    queue = measured()
    queue.clock.now += 1.0
    for principal, tokens in (("rude", 2), ("rude", 200), ("rude", 200), ("honest", 30)):
        queue.submit(job(lease(principal, length=0), base=tokens))
    assert sizes(queue.taken()) == {"honest": 30, "rude": 30}
    queue = measured()
    queue.clock.now += 1.0
    for principal, tokens in (("rude", 2), ("honest", 150)):
        queue.submit(job(lease(principal, length=0), base=tokens))
    assert sizes(queue.taken()) == {"honest": 150, "rude": 2}, "a short one makes it no shorter"


@pytest.mark.parametrize("seconds", [30.0, pytest.param(240.0, marks=pytest.mark.slow)])
def test_of_a_thousand_clients_a_third_are_rude(seconds: float) -> None:
    """Half of the honest answers come at most twice as late as without the rude ones, who want more
    than twice what the engine can do; and all of them come. The first tokens came after 71 ms and
    more where new prompts waited for those of the rude ones, and for their next rounds."""
    alone = Crowd(honest=667)
    alone.run(seconds)
    beside = Crowd(honest=667, rude=333)
    beside.run(seconds)
    assert len(alone.answers["honest"]) > 4 * seconds
    assert median(beside.answers["honest"]) <= 2 * median(alone.answers["honest"])
    assert median(beside.firsts["honest"]) <= 0.06
    assert max(beside.answers["honest"]) < 5.0
    under_way = sum(holder.principal == "honest" for holder in beside.asked)
    assert len(beside.answers["honest"]) + under_way == beside.begun["honest"]
    assert under_way < 20, "they wait for no more than the latest"
    assert len(beside.answers["rude"]) > 2 * seconds, "they are served with what is left"


def test_principals_that_want_the_same_fill_batches_together() -> None:
    both = Machine({"a": 8, "b": 8}).run(2.0)
    one = Machine({"a": 16}).run(2.0)
    assert both["a"] == pytest.approx(both["b"], rel=0.05)
    assert both["a"] + both["b"] >= 0.95 * one["a"]
    many = Machine({str(n): 1 for n in range(32)}).run(2.0)
    assert sum(many.values()) >= 0.95 * Machine({"a": 32}).run(2.0)["a"]


def test_prompts_that_another_session_has_run_begin_together_although_rounds_are_about_to_come() -> (
    None
):
    queue = Timed()
    source = lease(length=40)
    source.slot = 0
    queue.submit(job(source, base=40))
    queue.next()
    queue.clock.now += 0.01
    jobs = [job(lease(length=0), base=40) for _ in range(11)]
    for one in jobs:
        one.lease.share = source
        one.lease.share_tokens = 40
        queue.submit(one)
    ran = pieces(queue.next())
    assert [(piece.start, piece.size) for piece in ran] == [(40, 0)] * 11
    for one in jobs:
        one.lease.slot = 1
        one.lease.length = 40
    assert drafts(queue.next()) == jobs


@pytest.mark.parametrize(
    ("seconds_a_token", "steps"), [(0.06, range(15, 24)), (0.001, range(3, 5))]
)
def test_a_slow_target_reads_a_prompt_in_forwards_of_seconds(
    seconds_a_token: float, steps: range
) -> None:
    """In forwards of 256 tokens nobody heard for 15 s how much it had read."""
    scheduler = Scheduler(LIMITS, prefill_tokens=256)
    one = lease(length=0)
    scheduler.prefill(one, [1] * 601, 600)
    now = 0.0
    longest = 0.0
    taken = 0
    while one.length < 600:
        step = scheduler.schedule(now)
        assert not isinstance(step, float)
        size = sum(piece.size for piece in step.prefill)
        seconds = 0.25 + seconds_a_token * size
        now += seconds
        longest = max(longest, seconds)
        one.length += size
        taken += 1
        scheduler.finished(step, StepOutcome(ended=now), now)
    assert taken in steps
    assert longest < 5.0
