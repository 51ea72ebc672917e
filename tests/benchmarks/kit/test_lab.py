"""Links that begin anywhere in their cycle, and prompts of all kinds."""

from __future__ import annotations

import pytest

from benchmarks.kit.lab import Asking, link_to, load, mean_rtt, turned
from edge_client.tools.emulated_network import PROFILES, Condition, Profile
from moa.errors import UsageError


def test_a_cycle_that_begins_elsewhere_is_the_same_cycle() -> None:
    bursty = PROFILES["bursty"]
    for share in (0.0, 0.3, 0.8, 0.95, 1.3):
        profile = turned(bursty, share)
        for second in (0.05, 3.05, 7.05, 9.05):
            assert profile.at(second) == bursty.at(second + 10 * share)
        assert sum(seconds for seconds, _ in profile.phases) == pytest.approx(10)
    assert turned(PROFILES["wifi"], 0.5) is PROFILES["wifi"]


def test_the_mean_round_trip_weighs_time() -> None:
    assert mean_rtt(PROFILES["4g"]) == 60
    assert mean_rtt(Profile(((3.0, Condition(10)), (1.0, Condition(50))))) == 20


def test_a_link_needs_an_address() -> None:
    with pytest.raises(UsageError, match="ws://HOST:PORT"):
        link_to("wss://somewhere", PROFILES["wifi"])


def test_some_prompts_are_of_all_kinds() -> None:
    def skills(prompts: int) -> list[str]:
        return [example.skill for example in load(Asking(prompts=prompts))[1]]

    every = skills(0)
    assert skills(4) == every[::4]
    assert skills(99) == every
