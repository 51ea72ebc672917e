"""The waiting times of device and page follow the measured link and target, and are the same."""

from __future__ import annotations

import pytest

from edge_client.turn.pacing import ANSWER_TIMES, LONGEST, OFFLINE_AFTER, waits
from tests.web.node import Node

IMPORTS = 'import { waits } from "./pacing.js";'
HANDLE = "return waits(ask[0], ask[1]);"
TOY = (0.02, 0.02 + 0.003)
"""Round trip, and usual time of an answer, of the embedded pair over 4g."""
REAL = (0.05, 0.05 + 0.25)
SLOW = (0.6, 0.6 + 1.0)
"""A large target on a CPU, over a satellite."""


@pytest.mark.parametrize("measured", [TOY, REAL, SLOW, (0.0, 0.0), (9.0, 99.0)])
def test_page_and_device_wait_alike(node: Node, measured: tuple[float, float]) -> None:
    there = node.ask(measured)
    here = waits(*measured)
    assert there["offline"] == pytest.approx(here.offline)
    assert there["pace"] == pytest.approx(here.pace)
    assert there["stalled"] == pytest.approx(max(3.0, ANSWER_TIMES * measured[1]))


def test_a_fast_target_has_the_least_times_and_a_slow_one_longer() -> None:
    toy, real, slow = (waits(*measured, settle=1.0) for measured in (TOY, REAL, SLOW))
    assert (toy.offline, toy.late, toy.pace, toy.settle) == (1.0, 1.0, 0.05, 1.0)
    assert (real.offline, real.late, real.settle) == pytest.approx((1.0, 1.2, 1.2))
    assert real.pace == pytest.approx(0.06)
    assert (slow.offline, slow.late, slow.settle) == pytest.approx((2.4, LONGEST, LONGEST))
    assert slow.settle_away == pytest.approx(2.4), "a target that is away is not slow"


def test_what_the_user_sets_is_the_least_and_nothing_stays_nothing() -> None:
    patient = waits(*SLOW, offline_after=20.0, settle=30.0)
    assert (patient.offline, patient.late, patient.settle) == (20.0, 20.0, 30.0)
    at_once = waits(*SLOW, offline_after=0.0, settle=0.0)
    assert (at_once.offline, at_once.late, at_once.settle) == (0.0, 0.0, 0.0)
    assert waits(0.0, 0.0).offline == OFFLINE_AFTER


def test_the_page_takes_a_slow_link_for_silent_later(node: Node) -> None:
    assert node.ask(TOY)["silent"] == pytest.approx(2.5)
    assert node.ask(SLOW)["silent"] == pytest.approx(1 + 2.4)
    assert node.ask(SLOW)["dead"] > node.ask(TOY)["dead"]
