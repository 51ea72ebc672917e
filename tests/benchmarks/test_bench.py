"""`make bench`: what it runs, and in how long."""

from __future__ import annotations

import sys

import pytest

from benchmarks import __main__ as bench
from moa.errors import run_cli
from tools.readme import TITLES


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--dry-run", *arguments])
    assert bench.main() == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]


def test_all_of_it_stays_below_half_an_hour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = [experiment for experiment in bench.experiments() if not experiment.on_request]
    assert plan(monkeypatch, capsys) == [experiment.name for experiment in usual]
    assert sum(experiment.minutes for experiment in usual) < 30


def test_what_is_named_runs_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(monkeypatch, capsys, "client_exact", "timeline") == ["timeline", "client_exact"]


def test_an_unknown_name_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "sped"])
    assert run_cli("benchmarks", bench.main) == 2
    assert "no experiment 'sped'" in capsys.readouterr().err


def test_every_experiment_has_a_heading() -> None:
    assert {experiment.name for experiment in bench.experiments()} <= set(TITLES)
