"""Pictures: all of them from results as the benchmarks write them, stable, captioned, and stale when they should be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import __main__ as plots
from benchmarks.plots.kit import PICTURES, caption, colour, digest, drawn_from, save

_PROVENANCE = {
    "command": "python -m benchmarks.something --json benchmarks/results/something.json",
    "commit": "0123456789ab",
    "hardware": {"processor": "Some CPU", "cores": 2},
}
_LINKS = {"wifi": 10.0, "bursty": 82.0}
_WAYS = ("plain API streaming", "a call a token", "device", "server-drafted", "auto")


def _grid(*steps: float) -> dict[str, Any]:
    runs = [
        {
            "link": link,
            "step_ms": step,
            "temperature": 0.0,
            "way": way,
            "tokens": [8] * 4,
            "seconds": [[1.0 + n + step / 100 + prompt / 10] for prompt in range(4)],
        }
        for link in _LINKS
        for step in steps
        for n, way in enumerate(_WAYS)
    ]
    return {"rtt_ms": _LINKS, "kinds": ["exercises", "code"] * 2, "runs": runs}


def _cuts(*ways: str) -> list[dict[str, Any]]:
    return [
        {"way": way, "cut": cut, "right": n, "asked": 4} for n, way in enumerate(ways) for cut in (0, 8, 64)
    ]  # fmt: skip


def _span(name: str, lane: int, start: float, duration: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 1, "tid": 1 + lane, "ts": start, "dur": duration, "args": {}}


RESULTS: dict[str, dict[str, Any]] = {
    "acceptance": {
        "runs": [
            {
                "drafter": drafter,
                "shape": shape,
                "temperature": temperature,
                "mean": {"tau": 3.0},
                "by_position": [0.9, 0.5, None],
            }
            for drafter in ("drafter", "eagle2")
            for shape in ("chain", "tree")
            for temperature in (0.0, 1.0)
        ]
    },
    "client_offline": {"runs": _cuts("target", "MoA", "MoA without records", "API client (stops)")},
    "drafters_offline": {"runs": _cuts("target", "MoA", "eagle2", "API client (stops)")},
    "drafters_natural": {
        "runs": [
            {
                "drafter": drafter,
                "steps": 10,
                "temperature": 0.0,
                "mean": {"tau": 2.0, "se": 0.1},
                "categories": {kind: {"tau": 2.0, "se": 0.1} for kind in ("code", "exercises")},
            }
            for drafter in ("moa0", "moa0-1", "eagle2")
        ]
    },
    "export_steps": {
        "shapes": {
            "embedded": [
                {"form": form, "threads": threads, "tokens": tokens, "ms": 0.5}
                for form in ("fp32", "int4 b128, drafts from 8000")
                for threads in (1, 2)
                for tokens in (1, 8)
            ]
        }
    },
    "client_links": _grid(0.0),
    "client_slow": _grid(10.0, 60.0),
    "client_records": {
        "runs": [
            {"what": what, "value": value, "shape": shape, "tau": 3.0}
            for what, values in {"lag": (0, 8, "prompt only"), "precision": ("fp16", "off")}.items()
            for value in values
            for shape in ("chain", "tree")
        ]
    },
    "client_reconnect": {
        "runs": [
            {"policy": p, "cut": c, "gap_seconds": g, "right": 1, "asked": 2, "seconds": g, "retracted": 0.5}
            for p in ("rewind", "keep")
            for c in (8, 24)
            for g in (1.0, 20.0)
        ]
    },
    "capacity": {
        "reading_speed": 10.0,
        "runs": [
            {"target": "embedded, 7M", "way": "plain decoding", "users": 10},
            {"target": "embedded, 7M", "way": "device-drafted", "users": 24},
        ],
    },
    "timeline": {
        "link": "4g",
        "step_ms": 30.0,
        "round": {"from_us": 0.0, "to_us": 5000.0},
        "traceEvents": [
            _span("foresee", 0, 100, 400),
            _span("up", 1, 500, 900),
            _span("verify", 2, 1400, 600),
            _span("verify on", 2, 2000, 600),
            _span("records", 4, 2000, 9000),
            {"name": "ask", "ph": "i", "ts": 500, "pid": 1, "tid": 1, "args": {}},
        ],
    },
}
for _result in RESULTS.values():
    _result["provenance"] = _PROVENANCE


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of every kind in a folder."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name, result in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_every_picture_is_drawn_captioned_and_up_to_date(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("matplotlib.legend.Legend._find_best_position")  # it takes as long as the machine is busy
    out = tmp_path / "pictures"
    assert plots.main(["--results", str(results), "--out", str(out)]) == 0
    names = list(PICTURES)
    assert len(set(names)) == len(names)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    )
    for picture in PICTURES.values():
        svg = (out / f"{picture.name}.svg").read_text()
        assert _PROVENANCE["commit"] in svg
        assert picture.alt in svg
        assert "<dc:date>" not in svg
    assert plots.stale(plots.read(results), out, PICTURES.values()) == []
    assert plots.main(["--results", str(results), "--out", str(out), "--check"]) == 0


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    picture = PICTURES["who-wins-where"]
    first, again = (save(picture, RESULTS["client_slow"], tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_a_picture_of_other_results_is_stale(tmp_path: Path) -> None:
    plan = [PICTURES["capacity"], PICTURES["timeline"]]
    for picture in plan:
        save(picture, RESULTS[picture.source], tmp_path)
    other = copy.deepcopy(RESULTS)
    other["capacity"]["runs"][0]["users"] = 11
    assert plots.stale(other, tmp_path, plan) == ["capacity"]
    del other["capacity"]  # a picture of what is no longer there
    assert plots.stale(other, tmp_path, plan) == ["capacity"]
    for kind in ("png", "svg"):
        (tmp_path / f"capacity.{kind}").unlink()
    assert plots.stale(other, tmp_path, plan) == []
    (tmp_path / "timeline.png").unlink()
    assert plots.stale(other, tmp_path, plan) == ["timeline"]
    assert drawn_from(tmp_path / "no.svg") == ""


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "capacity.json").write_text(json.dumps(RESULTS["capacity"]))
    assert plots.main(["capacity", "timeline", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["capacity.png", "capacity.svg"]
    assert "timeline: not drawn, timeline was not measured" in capsys.readouterr().err


def test_the_pictures_of_this_repository_are_up_to_date() -> None:
    assert plots.stale(plots.read(plots.RESULTS), plots.FOLDER, PICTURES.values()) == []


def test_mistakes_are_one_line(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moa.errors import run_cli

    def run(*arguments: str) -> tuple[int, str]:
        code = run_cli("plots", lambda: plots.main(list(arguments)))
        return code, capsys.readouterr().err

    code, said = run("nothing")
    assert (code, said.count("\n")) == (2, said.count("\n"))
    assert "no picture 'nothing'" in said
    code, said = run("--results", str(results), "--out", str(tmp_path / "none"), "--check", "capacity")
    assert code == 1
    assert "out of date: capacity" in said
    (results / "broken.json").write_text("{")
    code, said = run("--results", str(results), "--out", str(tmp_path))
    assert code == 2
    assert "not valid JSON" in said


def test_captions_and_hashes_name_their_sources() -> None:
    assert "commit 0123456789ab" in caption(RESULTS["capacity"], 8.0)
    assert digest(RESULTS["capacity"]) != digest(RESULTS["timeline"])


def test_a_way_has_one_colour_and_ways_side_by_side_differ() -> None:
    assert colour("auto") == colour("auto")
    measured = plots.read(plots.RESULTS)["client_slow"]["runs"]
    ways = {*_WAYS, "device, independent", *(run["way"] for run in measured)}
    assert len({colour(way) for way in ways}) == len(ways)
    assert len({colour(name) for name in ("MoA", "MoA without records", "eagle2", "independent", "target")}) == 5
