"""Profiles change over time as they say."""

from __future__ import annotations

from edge_client.tools.emulated_network import PROFILES


def test_bursty_repeats() -> None:
    bursty = PROFILES["bursty"]
    assert [bursty.at(t).rtt_ms for t in (0, 7.9, 8.1, 9.9, 10.1, 18.5)] == [40, 40, 250, 250, 40, 250]


def test_a_steady_profile_never_changes() -> None:
    assert PROFILES["wifi"].at(0) == PROFILES["wifi"].at(12345.6)


def test_outages_keep_the_link_between_them() -> None:
    profile = PROFILES["5g"].with_outages(3, 2)
    assert [profile.at(t).out for t in (0, 2.9, 3.1, 4.9, 5.1)] == [False, False, True, True, False]
    assert profile.at(0) == PROFILES["5g"].at(0)
