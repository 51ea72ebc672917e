"""Pictures: all of them from results as the benchmarks write them, stable, captioned, and stale when they should be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import __main__ as plots
from benchmarks.plots.kit import PICTURES, drawn_from, save

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


RESULTS: dict[str, dict[str, Any]] = {
    "client_offline": {"runs": _cuts("target", "MoA", "MoA without records", "API client (stops)")},
    "client_links": _grid(0.0),
    "client_slow": _grid(10.0, 60.0),
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
    plan = [PICTURES["speed-by-link"], PICTURES["accuracy-after-the-cut"]]
    for picture in plan:
        save(picture, RESULTS[picture.source], tmp_path)
    other = copy.deepcopy(RESULTS)
    other["client_links"]["runs"][0]["tokens"][0] = 11
    assert plots.stale(other, tmp_path, plan) == ["speed-by-link"]
    del other["client_links"]  # a picture of what is no longer there
    assert plots.stale(other, tmp_path, plan) == ["speed-by-link"]
    for kind in ("png", "svg"):
        (tmp_path / f"speed-by-link.{kind}").unlink()
    assert plots.stale(other, tmp_path, plan) == []
    (tmp_path / "accuracy-after-the-cut.png").unlink()
    assert plots.stale(other, tmp_path, plan) == ["accuracy-after-the-cut"]
    assert drawn_from(tmp_path / "no.svg") == ""


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "client_links.json").write_text(json.dumps(RESULTS["client_links"]))
    names = ["speed-by-link", "accuracy-after-the-cut"]
    assert plots.main([*names, "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["speed-by-link.png", "speed-by-link.svg"]
    assert "accuracy-after-the-cut: not drawn, client_offline was not measured" in capsys.readouterr().err


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
    code, said = run("--results", str(results), "--out", str(tmp_path / "none"), "--check", "speed-by-link")
    assert code == 1
    assert "out of date: speed-by-link" in said
    (results / "broken.json").write_text("{")
    code, said = run("--results", str(results), "--out", str(tmp_path))
    assert code == 2
    assert "not valid JSON" in said
