"""Background work between rounds: what may run when, and what it costs the rounds in virtual time."""

from __future__ import annotations

import pytest

from cloud_verifier.engine.pacing import Pacing
from tests.verifier.virtual import Reader, lease


def after_rounds(*, seconds: float = 0.01, gap: float = 0.02) -> Pacing:
    """At 100.0 a round has run, and so many before it that each is expected `gap` after the one
    before."""
    between = Pacing(0.0)
    now = 100.0 - 99 * gap - 100 * seconds
    for _ in range(100):
        between.round_ready(now)
        between.rounds_ran(seconds, 0.0, now + seconds)
        now += seconds + gap
    between.nothing_waits()
    return between


def test_the_longest_piece_that_may_run_now_is_the_longest_that_is_not_held() -> None:
    between = after_rounds(gap=0.02)
    for now in (100.0, 100.01, 100.017, 100.019, 100.03, 100.06):
        room = between.room(now)
        assert room >= 0.0025
        assert between.hold(room, now) == 0.0
        assert between.hold(room + 1e-4, now) > 0.0


@pytest.mark.parametrize(
    ("sessions", "pause", "seconds"),
    [(0, 0, 3), (1, 0.001, 25), (1, 0.02, 25), (1, 0.06, 8), (4, 0.02, 20), (16, 0.002, 30)],
)
def test_a_long_prompt_is_read_and_costs_verdicts_a_third_on_average(
    sessions: int, pause: float, seconds: float
) -> None:
    """A token at its end takes three times as long as at its beginning, and to fetch what it
    attends to as long as a round: where the least piece fits beside no round, credit of several
    pays for it."""
    machine = Reader(sessions, pause=pause)
    verdicts = machine.seconds["a"]
    while len(verdicts) < 200 * (sessions > 0):
        machine.turn()
    alone = sum(verdicts) / max(1, len(verdicts))
    verdicts.clear()
    began = machine.clock.now
    machine.begin(3000)
    while machine.reader.length < 3000:
        machine.turn()
    assert machine.clock.now < began + seconds
    assert sum(verdicts) <= 1.3 * alone * len(verdicts)
    assert max(verdicts[20:], default=0.0) <= 3.2 * alone, "once it is known what a piece takes"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    machine = Reader(0)
    short = lease(length=0)
    machine.begin(3000)
    while machine.reader.length < 1000:
        machine.turn()
    machine.queue.scheduler.prefill(short, [1] * 65, 64)
    until = machine.clock.now + 1.0
    while short.length < 64:
        machine.turn()
    assert machine.clock.now < until
    assert machine.reader.length < 2000


def test_rounds_wait_for_prompts_the_longer_the_more_of_these_there_are() -> None:
    pacing = Pacing(0.0)
    seconds = [
        pacing.beside(0.02, rounds=4, prompts=prompts, owed=False) for prompts in (1, 2, 3, 5, 90)
    ]
    assert seconds == pytest.approx([0.005, 0.005, 0.01, 0.02, 0.02])
    assert pacing.beside(0.02, rounds=4, prompts=1, owed=True) == pytest.approx(0.02)
