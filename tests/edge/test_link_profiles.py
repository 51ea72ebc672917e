"""Profiles change over time as they say, and traces are read or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.tools.emulated_network import PROFILES, read_trace
from moa.errors import UsageError


def test_bursty_repeats() -> None:
    bursty = PROFILES["bursty"]
    assert [bursty.at(t).rtt_ms for t in (0, 7.9, 8.1, 9.9, 10.1, 18.5)] == [40, 40, 250, 250, 40, 250]


def test_a_steady_profile_never_changes() -> None:
    assert PROFILES["wifi"].at(0) == PROFILES["wifi"].at(12345.6)


def test_outages_keep_the_link_between_them() -> None:
    profile = PROFILES["5g"].with_outages(3, 2)
    assert [profile.at(t).out for t in (0, 2.9, 3.1, 4.9, 5.1)] == [False, False, True, True, False]
    assert profile.at(0) == PROFILES["5g"].at(0)


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "tram.csv"
    path.write_text("seconds,rtt_ms,down_mbps,up_mbps\n0,30,50,10\n2,80,5,1\n3,80,0,0\n")
    trace = read_trace(path)
    assert trace.name == "tram"
    assert [trace.at(t).rtt_ms for t in (1, 2.5)] == [30, 80]
    assert [trace.at(t).out for t in (2.5, 3.5, 4.5)] == [False, True, False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seconds,rtt_ms\n0,1\n",
        "seconds,rtt_ms,down_mbps,up_mbps\n0,fast,1,1\n",
        "seconds,rtt_ms,down_mbps,up_mbps\n1,1,1,1\n0,1,1,1\n",
        "seconds,rtt_ms,down_mbps,up_mbps\n0,-5,1,1\n",
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_trace(path)
