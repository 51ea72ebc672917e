"""The sweep over the policy's numbers, over few cells and runs."""

from __future__ import annotations

import sys

import pytest

from moa.speculation import cost, policy
from tests.speculation import sweep
from tests.speculation.cells import CELLS, changed, value

FEW_CELLS = "cold draft"


def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> list[list[str]]:
    """The rows of all tables that it prints, by their columns."""
    words = ["sweep", "--only", FEW_CELLS, "--runs", "2", *options]
    monkeypatch.setattr(sys, "argv", words)
    sweep.main()
    lines = capsys.readouterr().out.splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_it_shows_each_set_beside_chance_and_each_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = "FEW=1,MARGIN=9"  # a draft must promise nine times the speed: there is none
    rows = shown(capsys, monkeypatch, "--set", "HOPE=0.8", "--set", worse, "--cells")
    by_title = {row[0]: row[1:] for row in rows}
    assert by_title["HOPE=0.8"][:4] == ["1.000", "1.0000", "1.000", "1.000"], "it is 0.8"
    assert by_title["chance alone"][2] != by_title["chance alone"][3]
    assert float(by_title[worse][3]) < 0.9
    cells = [name for name in CELLS if FEW_CELLS in name]
    assert len(cells) == 2
    assert all(len(by_title[name]) == 4 for name in cells)


@pytest.mark.parametrize("text", ["HOPS=0.8", "Policy=1", "HOPE", "HOPE=high"])
def test_a_number_that_is_none_of_the_policys_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        shown(capsys, monkeypatch, "--set", text)
    assert text.partition("=")[2 if "high" in text else 0] in capsys.readouterr().err


def test_numbers_are_changed_wherever_they_are_used_and_changed_back() -> None:
    def used() -> list[float]:
        weights = [cost.WEIGHT_IF_FASTER, policy.WEIGHT_IF_FASTER]
        return [*weights, policy._KEEP, cost._UNMEASURED_SLOPE, cost._LEAST_EXPLAINED]

    usual = used()
    with changed(sweep.numbers_of(sweep.BEFORE)):
        assert used() == [0.3, 0.3, 0.93, 0.01, 0.2]
    assert used() == usual


def test_a_machine_that_sleeps_is_slower_without_a_limit_of_what_a_sample_counts() -> None:
    asleep = "a machine that sleeps, 90% right"
    seeds = range(8)  # most runs lose 4 %, one half of its speed
    assert value(asleep, {"OUTLIER": 1e9}, seeds) < 0.95 * value(asleep, {}, seeds)


def test_crowds_wait_where_the_drafter_may_read_less_in_a_round() -> None:
    crowd = "16 ask at once, 90% right"
    usual = value(crowd, {}, [0])
    assert value(crowd, {"LONGEST_READING": 0.125}, [0]) < 0.95 * usual
    assert value(crowd, {}, [0]) == usual, "it is changed back"
