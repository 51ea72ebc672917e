"""A round put together from both ends, and a timeline of a real answer."""

from __future__ import annotations

import pytest

from benchmarks.device import timeline
from moa.wire.messages import Verdict


def test_rounds_are_put_together_from_both_ends() -> None:
    session = b"s" * 16
    events = [
        {"name": "draft", "ts": 100.0, "ph": "X", "dur": 50.0, "pid": 1, "tid": 1, "args": {"ahead": False}},
        {"name": "ask", "ts": 200.0, "ph": "i", "pid": 1, "tid": 1, "args": {"round": 1}},
    ]
    heard = [(1200.0, Verdict(session, 1, 4, [0], 7, queue_ms=0.1, forward_ms=0.5))]
    rounds = timeline.rounds_of(events, heard)
    assert rounds == [timeline.Round(200.0, 1200.0, 100.0, 500.0)]
    assert rounds[0].one_way == 200.0
    merged = {event["name"]: event for event in timeline.merged(events, heard, rounds) if event["ph"] == "X"}
    assert (merged["up"]["ts"], merged["queue"]["ts"], merged["verify"]["ts"], merged["verdict"]["ts"]) == (
        200.0, 400.0, 500.0, 1000.0,
    )  # fmt: skip
    assert timeline.shown(events, heard, rounds)["from_us"] < 100.0


@pytest.mark.slow
async def test_a_timeline_is_a_trace_with_every_part_of_a_round() -> None:
    result = await timeline.measure(timeline.Options(tokens=32))
    events = result["traceEvents"]
    assert {"up", "verify", "verdict", "records", "draft", "ask", "answer"} <= {event["name"] for event in events}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XiM"
        assert event["ph"] != "X" or event["dur"] >= 0
    assert result["round"]["from_us"] < result["round"]["to_us"]
