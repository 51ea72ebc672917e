"""What the comparison of guesses ahead counts, and its tables."""

from __future__ import annotations

from benchmarks.device import ahead
from edge_client.tools.compare import TimedAnswer


def answer(tokens: int, seconds: float) -> TimedAnswer:
    stats = dict.fromkeys(("forwards", "drafted", "foresees", "sent_bytes", "received_bytes"), 10)
    outcomes, by = {"likeliest": 3, "missed": 1}, {"device": tokens}
    return TimedAnswer([1], "", True, "length", stats | {
        "tokens": tokens, "seconds": seconds, "outcomes": outcomes, "streamed_by": by,
    })  # fmt: skip


def test_tables_tell_speeds_ratios_and_what_became_of_outcomes() -> None:
    where = {"link": "4g", "kind": "code", "temperature": 1.0, "step_ms": 30.0, "late_forwards": 0.0}
    speeds = {ahead.PLAIN: 4.0, ahead.ROUNDS: 2.0, ahead.AHEAD: 1.5, ahead.SERVER: 1.25, ahead.AUTO: 1.0}
    runs = [where | ahead.figures(way, [answer(10, s), answer(30, s)], 0.08) for way, s in speeds.items()]
    assert runs[0]["tokens_per_second"] == 5.0
    text = ahead.tables({"runs": runs, "prompts": 2, "tokens": 64, "at_once": 1})
    assert "| auto | 20.0 |" in text
    assert "| 30 ms | 2.00 / 1.25 / 4.00 |" in text
    assert "| 4g, code, T = 1 | 75% | 0% | 25% | 0% |" in text
    assert "| 4g, code, T = 1 | 100% | 0% | 0% |" in text
    assert "| auto | 2.00 |" in text, "milliseconds of the verifier's processor"
