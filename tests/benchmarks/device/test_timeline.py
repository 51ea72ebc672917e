"""A round put together from both ends, and a timeline of a real answer."""

from __future__ import annotations

import pytest

from benchmarks.device import timeline
from moa.wire.messages import StreamTokens


def test_a_forward_that_begins_when_the_one_before_ends_is_a_continued_round() -> None:
    def tokens(forward_ms: float, foreseen: int) -> StreamTokens:
        return StreamTokens(b"s" * 16, 1, 4, [7], drafted=3, forward_ms=forward_ms, foreseen=foreseen)

    events = [
        {"name": "foresee", "ts": 1_000.0, "ph": "X", "dur": 9_000.0, "pid": 1, "tid": 1, "args": {}},
        {"name": "ask", "ts": 10_000.0, "ph": "i", "pid": 1, "tid": 1, "args": {"kind": "Foresee", "round": 1}},
    ]
    heard = [(100_000.0, tokens(30, 3)), (131_000.0, tokens(30, 3)), (160_000.0, tokens(20, 0))]
    forwards = timeline.forwards_of(heard, way=30_000.0)
    assert forwards == [timeline.Forward(40_000, 70_000), timeline.Forward(71_000, 101_000, continued=True)]
    spans = {e["name"]: e["ts"] for e in timeline.merged(events, heard, forwards, 30_000.0) if e["ph"] == "X"}
    assert spans == {"foresee": 1_000, "up": 10_000, "verify": 40_000, "verify on": 71_000, "verdict": 101_000}
    stretch = timeline.shown(events, forwards, 30_000.0)
    assert stretch["from_us"] == 0.0
    assert stretch["to_us"] > 131_000


@pytest.mark.slow
async def test_a_timeline_is_a_trace_with_every_part_of_a_round() -> None:
    result = await timeline.measure(timeline.Options(tokens=32))
    events = result["traceEvents"]
    assert {"up", "verify", "verify on", "verdict", "records", "foresee", "ask"} <= {event["name"] for event in events}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XiM"
        assert event["ph"] != "X" or event["dur"] >= 0
    assert result["round"]["from_us"] < result["round"]["to_us"]
