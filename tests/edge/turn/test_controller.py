"""The controller does what pays, by what it has measured."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.link.estimates import RoundTrip, Smoothed
from edge_client.turn.controller import Controller, Usefulness
from moa.tree import DraftTree
from moa.wire import Refusal, decode_client, encode
from moa.wire.messages import Verify, Welcome, WireLimits


def measured(*, rtt: float, forward: float, step: float, accepted: int, depth: int = 8, **how: object) -> Controller:
    """A controller after many rounds of a chain of which `accepted` tokens were right."""
    controller = Controller(**how)  # type: ignore[arg-type]
    chain = DraftTree(list(range(depth + 1)), list(range(-1, depth)), [0.0] * (depth + 1))
    for _ in range(60):
        controller.rtt.add(rtt)
        controller.drafted(1, step)
        controller.verified(chain, accepted, forward)
    return controller


def test_a_slow_link_and_a_server_that_drafts() -> None:
    assert measured(rtt=0.2, forward=0.02, step=0.002, accepted=4).plan(200).draft == "server"


def test_no_draft_is_larger_than_a_frame_may_carry() -> None:
    limits = WireLimits(2**20, 8192, 8192, 4096, max_tree_nodes=2**20, max_chain_tokens=2**20)
    controller = Controller()
    controller.agreed(Welcome(2, ["tree"], "", "", "", "", "", 128, [2], limits))
    for most in (controller.max_nodes, controller.max_chain):
        assert decode_client(encode(Verify(bytes(16), 1, 0, [5] * (most + 1)))), "node 0 is the pending token"
        with pytest.raises(Refusal):
            decode_client(encode(Verify(bytes(16), 1, 0, [5] * (most + 2))))


def test_on_the_same_machine_the_device_drafts() -> None:
    controller = measured(rtt=0.0005, forward=0.03, step=0.001, accepted=4)
    for _ in range(5):
        controller.streamed(10, 10 * 0.04, drafts="server")
    assert controller.plan(200).draft == "device"


def test_a_drafter_that_is_never_right_is_not_used() -> None:
    """The server stops drafting by itself."""
    controller = measured(rtt=0.001, forward=0.01, step=0.01, accepted=0)
    assert controller.plan(200).draft == "server"


def test_long_waits_deserve_longer_drafts() -> None:
    near = measured(rtt=0.001, forward=0.005, step=0.004, accepted=3, can_tree=False)
    far = measured(rtt=0.3, forward=0.005, step=0.004, accepted=3, can_tree=False)
    assert far.plan(200, "device").shape.depth > near.plan(200, "device").shape.depth


def test_costly_nodes_make_small_drafts() -> None:
    """A mixture-of-experts target: every node wakes other experts."""
    cheap = measured(rtt=0.02, forward=0.05, step=0.001, accepted=5, can_tree=False)
    costly = measured(rtt=0.02, forward=0.05, step=0.001, accepted=5, can_tree=False)
    big = DraftTree(list(range(25)), list(range(-1, 24)), [0.0] * 25)
    for _ in range(60):
        cheap.verified(big, 5, 0.055)
        costly.verified(big, 5, 0.5)
    assert costly.plan(200, "device").shape.depth < cheap.plan(200, "device").shape.depth


@pytest.mark.parametrize("draft", ["device", "server", "none", "single"])
def test_what_the_user_says_is_done(draft: Any) -> None:
    assert measured(rtt=0.1, forward=0.1, step=0.1, accepted=1).plan(10, draft).draft == draft


def test_a_verifier_that_takes_no_drafts_is_asked_for_single_tokens() -> None:
    controller = measured(rtt=0.1, forward=0.01, step=0.01, accepted=1, can_tree=False, can_stream=False)
    controller.max_chain = 0
    assert controller.plan(10).draft == controller.plan(10, "device").draft == "single"


def test_a_verifier_without_streams() -> None:
    assert measured(rtt=0.5, forward=0.01, step=0.01, accepted=1, can_stream=False).plan(10).draft == "device"


def test_calibration_is_a_beginning_that_measurements_overrule() -> None:
    controller = Controller(can_tree=False)
    controller.calibrate([0.95] * 8, [])
    hopeful = controller.plan(200, "device").shape.depth
    chain = DraftTree(list(range(9)), list(range(-1, 8)), [0.0] * 9)
    for _ in range(100):
        controller.verified(chain, 0, 0.03)
    assert controller.plan(200, "device").shape.depth < hopeful


def test_levels_deeper_than_were_measured_are_taken_to_be_like_the_last() -> None:
    controller = Controller(can_tree=False)
    controller.calibrate([0.5, 0.95], [])
    chances = controller.acceptance[False].chances()
    assert chances[10] == pytest.approx(chances[1])
    assert chances[1] > 0.8


def test_a_sure_drafter_on_a_slow_link_goes_far() -> None:
    controller = measured(rtt=0.2, forward=0.03, step=0.001, accepted=16, depth=16, can_tree=False)
    assert controller.plan(200, "device").shape.depth == 16


def test_a_blind_draft_is_short_whoever_drafts() -> None:
    sure = measured(rtt=0.01, forward=0.05, step=0.001, accepted=16, depth=16, can_tree=False)
    seeing, blind = sure.plan(200), sure.plan(200, blind=True)
    assert seeing.draft == blind.draft == "device"
    assert blind.shape.depth < 6 < seeing.shape.depth


def test_a_costly_step_ends_a_draft_sooner() -> None:
    """A path is followed while its chance is worth the time of a step."""
    shapes = [
        measured(rtt=0.1, forward=0.03, step=step, accepted=4, can_tree=False).plan(200, "device").shape
        for step in (0.0001, 0.01)
    ]
    assert shapes[0].min_score < shapes[1].min_score < 0


def test_deadlines_follow_the_link() -> None:
    steady, jittery = RoundTrip(), RoundTrip()
    for i in range(50):
        steady.add(0.1)
        jittery.add(0.05 if i % 2 else 0.15)
    assert steady.usual(0.01) == pytest.approx(0.12, abs=0.01)
    assert jittery.usual(0.01) > 0.2


@pytest.mark.parametrize("seconds", [0.0, 1e5])
def test_times_that_no_machine_takes_are_survived(seconds: float) -> None:
    controller = measured(rtt=seconds, forward=seconds, step=seconds, accepted=3)
    assert controller.plan(100).shape.depth >= 1


def test_a_smoothed_value_starts_as_a_mean() -> None:
    value = Smoothed(weight=0.1)
    for sample in (1.0, 2.0, 3.0):
        value.add(sample)
    assert value.value == pytest.approx(2.0)


def test_guesses_that_are_never_in_time_are_made_ever_more_rarely() -> None:
    usefulness, guessed = Usefulness(), 0
    for _ in range(2000):
        guessed += not usefulness.rests
        usefulness.forward(False)
    assert guessed < 150
    while usefulness.rests:
        usefulness.forward(False)
    usefulness.forward(True)
    for _ in range(15):
        assert not usefulness.rests
        usefulness.forward(False)
