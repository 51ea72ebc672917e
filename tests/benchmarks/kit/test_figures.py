"""Tables and percentiles."""

from __future__ import annotations

from benchmarks.kit.figures import listing, percentiles, pivot, titled

RUNS = [{"way": way, "link": link, "rate": n / 2} for n, (way, link) in enumerate([("a", "x"), ("a", "y"), ("b", "y")])]


def test_a_table_by_two_keys_leaves_gaps_open() -> None:
    assert pivot(RUNS, "way", "link", "{rate:.1f}").splitlines() == [
        "| way | x | y |", "| --- | ---: | ---: |", "| a | 0.0 | 0.5 |", "| b | - | 1.0 |",
    ]  # fmt: skip


def test_a_table_by_runs_takes_formats_and_functions() -> None:
    shown = listing(RUNS[:1], {"way": "{way}", "twice": lambda run: str(2 * run["rate"])})
    assert shown.splitlines()[-1] == "| a | 0.0 |"
    assert titled(("One", shown)).startswith("**One**\n\n| way | twice |")


def test_a_percentile_is_a_value_that_was_there() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentiles(values) == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert percentiles(values, 95) == {"p95": 96.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
