"""The grid of ways, links and step times: its prompts and cells, and small runs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.device import grid
from edge_client.tools.compare import TimedAnswer
from moa.errors import MoaError, UsageError
from testing.verifier import Emulated, Running


def test_faster_targets_get_fewer_lanes() -> None:
    assert [grid.lanes_for(step, 8) for step in (0, 10, 30, 60, 120, 1000)] == [1, 1, 3, 6, 8, 8]


def test_exercises_and_natural_text_in_turn() -> None:
    asked = grid.texts(grid.KINDS, 8)
    assert [kind for kind, _ in asked] == [
        "exercises",
        "code",
        "exercises",
        "english",
        "exercises",
        "mixed",
        "exercises",
        "code",
    ]
    assert len({example.prompt for _, example in asked}) == 8
    assert Counter(kind for kind, _ in grid.texts(("exercises",), 3)) == {"exercises": 3}
    assert [kind for kind, _ in grid.texts(("code", "mixed"), 3)] == ["code", "mixed", "code"]


def test_opponents_draft_on_the_device_or_on_the_server() -> None:
    ways = grid.ways_of(
        grid.Options(ways=("auto",), pairs=("eagle2==weights", "other=bundle=", "both=b=w"))
    )
    assert {name: (way.bundle, way.drafter) for name, way in ways.items()} == {
        "auto": ("", ""),
        "server-drafted, eagle2": ("", "weights"),
        "device, other": ("bundle", ""),
        "device, both": ("b", ""),
        "server-drafted, both": ("", "w"),
    }
    with pytest.raises(UsageError, match="NAME=BUNDLE=DRAFTER"):
        grid.ways_of(grid.Options(pairs=("eagle2",)))


def test_figures_of_a_way() -> None:
    stats = {
        "tokens": 10,
        "seconds": 2.0,
        "calls": 3,
        "rounds": 3,
        "sent_bytes": 100,
        "received_bytes": 500,
        "forwards": 5,
        "first_token_seconds": 0.25,
        "streamed_by": {"device": 4},
    }
    answer = TimedAnswer([], "", True, "eos", stats)
    found = grid.Answers([[2.0, 2.0]], [[0.1, 0.1]], 0.1, [answer, answer]).figures()
    assert (found["tokens"], found["calls_per_100"], found["forwards_per_token"]) == (
        [10],
        30.0,
        0.5,
    )
    assert (found["up_bytes_per_token"], found["down_bytes_per_token"]) == (10.0, 50.0)
    assert (found["first_token_ms"], found["edge_cpu_ms_per_token"]) == (250.0, 5.0)
    assert found["streamed_by"] == {"device": 8}


def test_finished_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed in its third cell goes on there; with other options it begins again."""
    measured = []

    def cell(self: grid.Grid, at: grid.Cell, *_: Any) -> dict[str, Any]:
        measured.append(at.link)
        if len(measured) == 3:
            raise MoaError("the machine was switched off")
        return {"auto": {"seconds": [[len(measured)]]}}

    @contextlib.contextmanager
    def verifier(*_: Any, emulated: Emulated, **__: Any) -> Iterator[Running]:
        yield Running(
            ["ws://127.0.0.1:1"] * emulated.lanes, cast(Any, SimpleNamespace(pid=os.getpid()))
        )

    monkeypatch.setattr(grid, "verifier", verifier)
    monkeypatch.setattr(grid.Grid, "_cell", cell)

    def run(prompts: int) -> dict[str, Any]:
        kept = str(tmp_path / "kept")
        return grid.measure(
            grid.Options(prompts=prompts, links=("wifi", "5g", "4g"), lanes=1, kept=kept)
        )

    with pytest.raises(MoaError, match="switched off"):
        run(1)
    assert [one["seconds"] for one in run(1)["runs"]] == [[[1]], [[2]], [[4]]]
    assert measured == ["wifi", "5g", "4g", "4g"]
    run(2)
    assert measured[4:] == ["wifi", "5g", "4g"]
