"""The commands: results on stdout, progress on stderr, one line and exit code 2 for a user's
mistake."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import export.forms
from export.build import step_times
from export.cli import main
from moa.bundle import Bundle
from tests.export.conftest import Pair


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_dry_run_tells_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path
) -> None:
    arguments = ["build", "-t", pair.target, "-d", pair.drafter, "-o", tmp_path / "b", "--dry-run"]
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "cpu-int4: about" in out
    assert "vocabulary 128, drafts from 128" in out
    _, out, _ = run(capsys, *arguments, "--json")
    plan = json.loads(out)
    assert plan["record_width"] == 32
    assert plan["disk_bytes"] > sum(plan["variant_bytes"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_build_reports_progress_on_stderr_and_its_manifest_on_stdout(
    capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.build.step_times", partial(step_times, threads=(1,), seconds=0.001))
    arguments = [
        "build",
        "-t",
        pair.target,
        "-d",
        pair.drafter,
        "-o",
        tmp_path / "b",
        "-v",
        "cpu-fp32",
        "--json",
    ]
    code, out, err = run(capsys, *arguments)
    assert code == 0
    assert [time["tokens"] for time in json.loads(out)["variants"]["cpu-fp32"]["step_times"]] == [
        1,
        8,
    ]
    assert "moa-export: variant cpu-fp32" in err
    assert json.loads(out)["calibration"] is None
    assert "were not measured" in (tmp_path / "b" / "README.md").read_text()


def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bundle: Bundle,
    pair: Pair,
    tmp_path: Path,
) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "bundle").symlink_to(bundle.folder)
    setup = ["setup", pair.target, "--sibling", pair.target, "-o", tmp_path / "ours"]
    source = ["build", "-t", pair.target, "-d", pair.drafter]
    mistakes = {
        "belong together": ["build", "-t", pair.target, "-o", tmp_path / "b"],
        "--out is missing (--out DIR for the new bundle, or --dry-run)": source,
        "holds a bundle already": [*source, "-o", bundle.folder],
        "bundle holds a bundle already": setup,
        "unknown variant 'y'": [*setup, "-v", "y"],
        "unknown variant 'x'": [*source, "-o", tmp_path / "b", "-v", "x"],
        "no file at none.jsonl": [*source, "-o", tmp_path / "b", "--calibration", "none.jsonl"],
        "no file at none.txt": [*source, "-o", tmp_path / "b", "--vocab-text", "none.txt"],
        "cannot write to": [*source, "-o", bundle.folder / "README.md" / "bundle"],
        "--steps is for the training of --records": [*setup, "--steps", "3"],
        "--target: no such file or folder: ./none": ["build", "-t", "./none", "-d", pair.drafter],
        "--drafter: no such file or folder: ./nowhere": [
            "build",
            "-t",
            pair.target,
            "-d",
            "independent:./nowhere",
        ],
        "--sibling: no such file or folder: ./small": [*setup[:3], "./small", *setup[4:]],
    }
    out = tmp_path / "b"
    found_with_torch = {
        "no model nowhere: not a folder": ["build", "-t", pair.target, "-d", "nowhere", "-o", out],
        "--draft-vocab needs text": [*source, "-o", out, "--draft-vocab", "5"],
        "must be 1..128": [
            *source,
            "-o",
            out,
            "--draft-vocab",
            "500",
            "--vocab-text",
            bundle.folder / "README.md",
        ],
    }
    for message, arguments in (mistakes | found_with_torch).items():
        # None makes the import fail: torch takes seconds.
        monkeypatch.setitem(sys.modules, "torch", torch if message in found_with_torch else None)
        monkeypatch.setitem(
            sys.modules, "export.forms", export.forms if message in found_with_torch else None
        )
        code, said, err = run(capsys, *arguments)
        assert (code, said) == (2, ""), arguments
        last = err.strip().splitlines()[-1]
        assert last.startswith("moa-export: error: "), arguments
        assert message in last
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
