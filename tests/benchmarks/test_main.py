"""The runner: what it would run, and in how long; options, files, faults and mistakes of one
experiment."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks.experiments import EXPERIMENTS, ON_REQUEST, Experiment
from benchmarks.kit.options import one_of
from benchmarks.provenance import origin, write_result
from moa.errors import MoaError, run_cli
from tools.readme import TITLES

RESULTS = [
    one
    for one in (Path(bench.__file__).parent / "results").glob("*.json")
    if one.stem in EXPERIMENTS
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a made-up experiment takes."""

    count: int = 3
    """Of things, 3 % of them words."""
    names: tuple[str, ...] = one_of(("a",), "abc")
    """Theirs."""
    steps: tuple[float, ...] = (1.5, 2.0)
    fast: bool = True
    seed: int = 0


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment that is none, under the name `made_up`."""
    module: Any = ModuleType("made_up", "Count.")
    module.Options = Options
    module.measure = lambda options: {
        "runs": [options.count],
        **vars(options),
        "faults": options.count - 4,
    }
    module.tables = lambda result: f"{result['runs'][0]} things"
    monkeypatch.setitem(
        EXPERIMENTS, "made_up", Experiment("made_up", "counts", "", 1, {"count": 4})
    )
    monkeypatch.setattr(Experiment, "load", lambda _: module)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert bench.main([*arguments, "--dry-run"]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]


def test_all_of_it_stays_below_half_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    usual = [experiment for name, experiment in EXPERIMENTS.items() if name not in ON_REQUEST]
    assert plan(capsys) == [experiment.name for experiment in usual]
    assert sum(experiment.minutes for experiment in usual) < 32


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_every_experiment_takes_its_options_and_says_how_long_it_takes(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experiment.name in TITLES
    assert plan(capsys, experiment.name) == [experiment.name]
    defaults = bench.parser_for(experiment).parse_args([])
    options = bench.options_from(experiment.load().Options, defaults)
    for name, value in experiment.preset.items():
        assert getattr(options, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results_that_they_were_made_of(result: Path) -> None:
    made = EXPERIMENTS[result.stem].load().tables(json.loads(result.read_text()))
    assert set(made.splitlines()) <= set(result.with_suffix(".md").read_text().splitlines())


@pytest.mark.usefixtures("made_up")
def test_a_result_is_written_with_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--names", "b", "c", "--steps", "3", "--no-fast", "--seed", "7"]
    assert bench.main(["made_up", *flags, f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().out == "4 things\n"
    result = json.loads((tmp_path / "made_up.json").read_text())
    options = [result[name] for name in ("runs", "names", "steps", "fast", "seed")]
    assert options == [[4], ["b", "c"], [3.0], False, 7]
    assert set(result["provenance"]) == {"when", "hardware", "commit", "command", "versions"}
    words = (tmp_path / "made_up.md").read_text()
    assert words.startswith("4 things\n\n`")
    assert f"commit {result['provenance']['commit']}" in words
    assert f"({torch.backends.cpu.get_cpu_capability()})" in words, (
        "equal names are not equal speeds"
    )
    assert bench.main(["made_up", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made_up"]["runs"] == [4]


def test_a_result_names_no_place_of_the_machine(tmp_path: Path) -> None:
    root = Path(bench.__file__).parents[1]
    options = {
        "measured": f"{root}/benchmarks/results/a.json",
        "weights": ["/far/away/weights", "a/b", "/"],
    }
    write_result(tmp_path / "one", {"fleet": options, "count": 3, "says": "/ 3 = 5"})
    kept = json.loads((tmp_path / "one.json").read_text())
    assert kept["fleet"] == {
        "measured": "benchmarks/results/a.json",
        "weights": ["weights", "a/b", "/"],
    }
    assert (kept["count"], kept["says"]) == (3, "/ 3 = 5")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            ["-m", "benchmarks", "--out=/far/away/results", "--count=3"],
            "-m benchmarks --out=results --count=3",
        ),
        (
            ["--pairs", "one=/far/away/bundle=/far/weights", "two==/far/b"],
            "--pairs one=bundle=weights two==b",
        ),
        (
            ["-m", "benchmarks", "--ways", "plain API streaming"],
            "-m benchmarks --ways 'plain API streaming'",
        ),
    ],
)
def test_a_command_names_no_place_of_the_machine_and_can_be_run(
    given: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *given])
    assert origin()["command"] == f"python {shown}"


@pytest.mark.usefixtures("made_up")
def test_a_fault_that_was_measured_is_an_error_and_still_written(tmp_path: Path) -> None:
    with pytest.raises(MoaError, match="2 texts are not"):
        bench.main(["made_up", "--count=6", f"--out={tmp_path}"])
    assert (tmp_path / "made_up.json").exists()


@pytest.mark.usefixtures("made_up")
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("benchmarks", lambda: bench.main(["sped"])) == 2
    assert "no experiment 'sped'" in capsys.readouterr().err
    for number, least in (("--count=0", 1), ("--seed=-1", 0), ("--steps=-1", 0)):
        assert run_cli("benchmarks", lambda flag=number: bench.main(["made_up", flag])) == 2
        assert f"must be at least {least}" in capsys.readouterr().err
    for flags, said in (
        (["--cuont", "1"], "unrecognized arguments"),
        (["--names", "d"], "invalid choice"),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.main(["made_up", *flags])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        bench.main(["made_up", "--help"])
    assert "Of things, 3 % of them words. (default: 3)" in capsys.readouterr().out
