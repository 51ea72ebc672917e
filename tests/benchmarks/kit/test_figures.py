"""Percentiles; tables are shown by those of the results that are kept."""

from __future__ import annotations

from benchmarks.kit.figures import percentiles


def test_a_percentile_is_a_value_that_was_there() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentiles(values) == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert percentiles(values, 95) == {"p95": 96.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
