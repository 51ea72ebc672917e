"""The controller does what pays, by what it has measured, and deadlines follow it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.link.estimates import RoundTrip, Smoothed
from edge_client.turn.controller import Controller, Usefulness
from edge_client.turn.deadlines import Deadlines, Moment, Patience
from moa.wire import Refusal, decode_client, encode
from moa.wire.messages import Foresee, Welcome, WireLimits


def measured(
    *, rtt: float, forward: float, step: float, accepted: int, depth: int = 8, nodes: int = 9
) -> Controller:
    """A controller after many answers to guesses of which `accepted` in a row were right."""
    controller = Controller()
    for _ in range(60):
        controller.rtt.add(rtt)
        controller.step.observe(1, step)
        controller.guessed(accepted, accepted < depth)
        controller.ran(nodes, forward)
    return controller


def depth_of(controller: Controller) -> int:
    return controller.first_guesses(200).depth


def test_no_message_is_larger_than_a_frame_may_carry() -> None:
    limits = WireLimits(2**20, 8192, 8192, 4096, max_tree_nodes=2**20, max_guess_tokens=2**20)
    controller = Controller()
    controller.agreed(Welcome(3, ["foresee"], "", "", "", "", "", 128, [2], limits))
    most = controller.most_guesses + 1
    for tokens in (most, most + 1):  # node 0 is the pending token
        frame = encode(
            Foresee(bytes(16), 1, 0, [5] * tokens, [*range(-1, tokens - 1)], [0] * tokens)
        )
        if tokens == most:
            assert decode_client(frame)
            continue
        with pytest.raises(Refusal):
            decode_client(frame)


def test_long_waits_and_sure_drafters_deserve_deeper_guesses_and_costly_nodes_shallower() -> None:
    near, far = (measured(rtt=rtt, forward=0.005, step=0.004, accepted=3) for rtt in (0.001, 0.3))
    assert depth_of(far) > depth_of(near)
    assert depth_of(measured(rtt=0.2, forward=0.03, step=0.001, accepted=16, depth=16)) == 16
    cheap, costly = (measured(rtt=0.02, forward=0.05, step=0.001, accepted=5) for _ in range(2))
    for _ in range(60):  # a mixture-of-experts target: every node wakes other experts
        cheap.ran(25, 0.055)
        costly.ran(25, 0.5)
    assert depth_of(costly) < depth_of(cheap)


def test_a_costly_step_ends_a_path_sooner() -> None:
    """A path is followed while its chance is worth the time of a step."""
    cheap, costly = (
        measured(rtt=0.1, forward=0.03, step=step, accepted=4).first_guesses(200).least
        for step in (0.0001, 0.01)
    )
    assert cheap < costly < 0


def test_a_fast_drafter_guesses_further_before_the_first_message_than_its_steps_win() -> None:
    fast, slow = (measured(rtt=0.06, forward=0.03, step=step, accepted=4) for step in (0.001, 0.01))
    for controller, of_what_a_step_wins in ((fast, 0.2), (slow, 1.0)):
        first = controller.first_guesses(200)
        drafting = first.depth * controller.step.seconds(4)
        tokens = 1 + controller.acceptance.totals()[first.depth - 1]
        a_step = controller.step.seconds(4) * tokens / (0.06 + 0.03 + drafting)
        assert math.exp(first.least) == pytest.approx(of_what_a_step_wins * a_step, rel=0.1)


def test_calibration_is_a_beginning_that_measurements_overrule() -> None:
    controller = Controller()
    controller.calibrate([0.4, 0.6], [0.5, 0.95])
    chances = controller.acceptance.chances()
    assert chances[10] == pytest.approx(chances[1]), (
        "levels deeper than were measured are taken to be like the last"
    )
    assert chances[1] > 0.8
    assert controller.server_acceptance == pytest.approx(0.5)
    hopeful = depth_of(controller)
    for _ in range(100):
        controller.guessed(0, wrong=True)
        controller.ran(9, 0.03)
    assert depth_of(controller) < hopeful


@pytest.mark.parametrize("seconds", [0.0, 1e5])
def test_times_that_no_machine_takes_are_survived(seconds: float) -> None:
    assert depth_of(measured(rtt=seconds, forward=seconds, step=seconds, accepted=3)) >= 1


def test_deadlines_follow_the_link_and_a_smoothed_value_starts_as_a_mean() -> None:
    steady = RoundTrip()
    jittery = RoundTrip()
    value = Smoothed(weight=0.1)
    for i in range(50):
        steady.add(0.1)
        jittery.add(0.05 if i % 2 else 0.15)
    assert steady.usual(0.01) == pytest.approx(0.12, abs=0.01)
    assert jittery.usual(0.01) > 0.2
    for sample in (1.0, 2.0, 3.0):
        value.add(sample)
    assert value.value == pytest.approx(2.0)


def test_guesses_that_are_never_in_time_are_made_ever_more_rarely_until_one_is() -> None:
    usefulness = Usefulness()
    guessed = 0
    for _ in range(2000):
        guessed += not usefulness.rests
        usefulness.forward(False)
    assert guessed < 150
    usefulness.forward(True)
    assert not usefulness.rests


# ---- deadlines

times = st.floats(-1e9, 1e9) | st.just(float("inf")) | st.just(float("nan"))


@given(now=st.floats(0, 1e9), deadlines=st.lists(times))
def test_a_deadline_has_passed_or_ends_the_wait(now: float, deadlines: list[float]) -> None:
    moment = Moment(now)
    waiting = [at for at in deadlines if not moment.reached(at)]
    assert moment.next is None or moment.next > now
    assert all(moment.next is not None and moment.next <= at for at in waiting)


def test_the_prompt_and_the_link_are_part_of_the_usual_wait() -> None:
    controller = Controller()
    controller.rtt.add(0.1)
    controller.prefill.add(2.0 / 100)
    new, running = (
        Deadlines(Patience(), controller, waiting_since=0.0, unread=unread) for unread in (50, 0)
    )
    for deadlines in (new, running):
        deadlines.asked(10.0)
    assert new.write_at() - running.write_at() == pytest.approx(1.0)
    running.lost(5.0)
    assert running.write_at() == 6.0, "a link that is known to be down is not waited for again"
