"""Background work between rounds: what may run when, and what it costs the rounds in virtual time."""

from __future__ import annotations

import pytest

from cloud_verifier.engine.interleaving import Interleaving, PiecewiseForward
from cloud_verifier.engine.scheduler import Reading
from tests.verifier.virtual import Clock, Reader, chunks, drafts, job, lease, scheduler


def after_rounds(*, seconds: float = 0.01, gap: float = 0.02, prompts: bool = False) -> Interleaving:
    """At 100.0 a round has run, and so many before it that each is expected `gap` after the one before."""
    between, now = Interleaving(0.0), 100.0 - 99 * gap - 100 * seconds
    for _ in range(100):
        between.round_ready(now)
        between.rounds_begin(seconds, prompts=prompts)
        between.rounds_end(now, now + seconds)
        now += seconds + gap
    between.nothing_waits()
    return between


def test_a_piece_that_a_round_hardly_notices_never_waits() -> None:
    between = after_rounds(seconds=0.01)
    assert between.hold(0.0025, 100.02) == 0.0
    assert between.hold(0.0026, 100.02) > 0.0
    assert after_rounds(seconds=0.01, prompts=True).hold(0.0011, 100.019) > 0.0, "prompts go along with the rounds"


def test_a_piece_runs_at_once_if_it_ends_before_the_next_round_is_likely_to_come() -> None:
    between = after_rounds(gap=0.02)
    assert between.hold(0.015, 100.001) == 0.0
    assert between.hold(0.015, 100.01) > 0.0


def test_a_piece_leaves_the_model_to_the_round_that_is_about_to_come_for_as_long_as_it_takes() -> None:
    between = after_rounds(gap=0.02)
    assert between.hold(0.03, 100.01) == pytest.approx(0.03 + 0.008, rel=0.01), (
        "until the round may come, and its own length"
    )
    assert between.hold(0.03, 100.04) == pytest.approx(0.03 - 0.022, rel=0.01)
    assert between.hold(0.03, 100.05) == 0.0


def test_rounds_earn_credit_by_which_a_piece_goes_first_and_which_it_uses_up() -> None:
    between = after_rounds(seconds=0.01)
    assert not between.has_credit
    for now in (100.0, 100.02):
        between.rounds_end(now, now + 0.01)
    assert between.goes_first(0.0049)
    assert not between.goes_first(0.0051)
    assert between.hold(0.03, 100.049) == pytest.approx(0.03 - 0.005 - 0.001, rel=0.01)
    between.piece_ends(100.03, 100.034)
    assert between.goes_first(0.0009)
    assert not between.goes_first(0.0011)
    between.nothing_waits()
    assert not between.has_credit


def test_the_longest_piece_that_may_run_now_is_the_longest_that_is_not_held() -> None:
    between = after_rounds(gap=0.02)
    for now in (100.0, 100.01, 100.017, 100.019, 100.03, 100.06):
        room = between.room(now)
        assert room >= 0.0025
        assert between.hold(room, now) == 0.0
        assert between.hold(room + 1e-4, now) > 0.0


def test_shorter_gaps_are_believed_in_at_once_and_longer_ones_slowly() -> None:
    between = after_rounds(gap=0.02)
    between.round_ready(100.05)
    between.round_ready(109.0)  # only the first one ends the gap
    assert between.longest == pytest.approx(0.3 * 0.023, rel=0.01)
    between.rounds_end(109.0, 109.01)
    between.round_ready(112.0)  # they had gone
    assert between.longest == pytest.approx(0.3 * 0.023, rel=0.01)
    between.rounds_end(110.0, 110.01)
    between.round_ready(110.02)
    assert between.longest == pytest.approx(0.3 * 0.01, rel=0.01)


def test_a_piece_is_expected_to_take_as_long_as_those_before_it() -> None:
    forward = PiecewiseForward(pieces=3, predicted=0.3)
    assert forward.piece == pytest.approx(0.1)
    for seconds in (0.2, 0.4):
        forward.piece_ends(seconds)
        assert not forward.complete
    assert forward.piece == pytest.approx(0.3)
    forward.piece_ends(0.3)
    assert forward.complete


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
