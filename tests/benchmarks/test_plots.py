"""Pictures: all of them from the results of this repository, stable, captioned, and stale when they
should be."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from benchmarks.plots import __main__ as plots
from benchmarks.plots.kit import PICTURES
from moa.errors import run_cli

RESULTS = plots.read(plots.RESULTS)


def test_every_picture_is_drawn_captioned_and_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(
        "matplotlib.legend.Legend._find_best_position"
    )  # it takes as long as the machine is busy
    first = tmp_path / "first"
    again = tmp_path / "again"
    for out in (first, again):
        assert plots.main(["--out", str(out)]) == 0
    for picture in PICTURES.values():
        for kind in ("png", "svg"):
            drawn, redrawn = (out / f"{picture.name}.{kind}" for out in (first, again))
            assert drawn.read_bytes() == redrawn.read_bytes()
        svg = drawn.read_text()
        assert RESULTS[picture.source]["provenance"]["commit"] in svg
        assert picture.alt in svg
        assert "<dc:date>" not in svg
    assert plots.main(["--out", str(first), "--check"]) == 0


def test_the_pictures_of_this_repository_are_up_to_date_and_those_of_other_results_are_stale() -> (
    None
):
    plan = list(PICTURES.values())
    other = copy.deepcopy(RESULTS)
    assert plots.stale(RESULTS, plots.FOLDER, plan) == []
    other["client_links"]["runs"][0]["tokens"][0] += 1
    assert plots.stale(other, plots.FOLDER, plan) == ["speed-by-link"]
    del other["client_links"]  # a picture of what is no longer there
    assert plots.stale(other, plots.FOLDER, plan) == ["speed-by-link"]


def test_a_picture_of_a_result_that_is_gone_goes_and_what_is_missing_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speed-by-link.svg").touch()
    assert plots.main(["speed-by-link", "--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert "speed-by-link: not drawn, client_links was not measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert (
        run_cli("plots", lambda: plots.main(["speed-by-link", "--check", "--out", str(tmp_path)]))
        == 1
    )
    assert "out of date: speed-by-link" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    for arguments, said in (
        (["nothing"], "no picture 'nothing'"),
        (["--results", str(tmp_path)], "not valid JSON"),
    ):
        assert run_cli("plots", lambda given=arguments: plots.main(given)) == 2
        assert said in capsys.readouterr().err
