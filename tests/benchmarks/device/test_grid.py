"""The grid of ways, links and step times: its cells and figures, and a small run."""

from __future__ import annotations

import pytest

from benchmarks.device import grid
from edge_client.tools.compare import TimedAnswer


def test_faster_targets_get_fewer_lanes() -> None:
    assert [grid.lanes_for(step, 8) for step in (0, 10, 30, 60, 120, 1000)] == [1, 1, 3, 7, 8, 8]


def test_ways_take_turns_in_every_pass_and_the_slowest_runs_once() -> None:
    options = grid.Options(links=("wifi",), repeats=2)
    ways = ["auto", grid.SLOWEST]
    assert [cell[1:] for cell in grid.cells_of(options, ways, 1)] == [(0, "auto"), (0, grid.SLOWEST), (1, "auto")]
    assert [cell.way for cell in grid.cells_of(options, ways, 2)] == [grid.SLOWEST, "auto", "auto"]


def test_figures_of_a_cell() -> None:
    stats = {
        "tokens": 10, "seconds": 2.0, "calls": 3, "rounds": 3, "sent_bytes": 100, "received_bytes": 500,
        "offline_tokens": 0, "retracted": 0, "first_token_seconds": 0.25,
    }  # fmt: skip
    found = grid.figures([TimedAnswer([], "", True, "eos", stats)] * 2, 0.1)
    assert (found["tokens"], found["tokens_per_second"], found["calls_per_100"]) == (20, 5.0, 30.0)
    assert (found["up_bytes_per_token"], found["down_bytes_per_token"]) == (10.0, 50.0)
    assert (found["first_token_ms"], found["edge_cpu_ms_per_token"]) == (250.0, 5.0)


def test_a_cell_is_told_by_the_medians_of_its_passes() -> None:
    where = {"link": "wifi", "step_ms": 0.0, "way": "auto"}
    passes = [where | {"same": 6, "tokens_per_second": rate, "calls_per_100": 2.0} for rate in (10.04, 90.0, 20.0)]
    counted = {"same": 18, "repeats": 3, "speeds": [10.0, 90.0, 20.0]}
    assert grid.middles(passes) == [where | counted | {"tokens_per_second": 20.0, "calls_per_100": 2.0}]


@pytest.mark.slow
def test_a_small_grid() -> None:
    small = {"prompts": 1, "tokens": 12, "repeats": 1, "links": ("wifi",), "steps": (30.0,)}
    result = grid.measure(grid.Options(**small, independent="", eagle=""))  # type: ignore[arg-type]
    found = {run["way"]: run for run in result["runs"]}
    assert found[grid.SLOWEST]["calls_per_100"] == 100
    assert found["plain API streaming"]["tokens_per_second"] < 1000 / 30
    assert "5 of 5 texts equal the target's own" in grid.tables(result)
