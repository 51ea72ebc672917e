"""Right answers are counted for the target, and for drafters with and without its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.baselines.registry import save
from benchmarks.witness import answers
from benchmarks.witness.__main__ import main
from moa.target.torch_target import Target
from testing.tiny import save_tiny
from tests.benchmarks.pairs import opponent


def test_every_way_answers_every_task_whose_prompt_does_not_end_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list(answers.tasks())
    assert len({prompt for _, prompt, _ in asked}) == len(asked) > 90
    assert all(right and not prompt.endswith(right) for _, prompt, right in asked)
    folder = save_tiny("llama", tmp_path / "target")
    target = Target.load(folder)
    for kind in ("independent", "states"):
        save(opponent(kind, target), tmp_path / kind)
    said = "letters", "A, B", ""  # whatever is said begins with nothing
    monkeypatch.setattr(
        answers, "tasks", lambda: iter([said, ("counting", "1, 2", "none says this")])
    )
    assert (
        main(["answers", str(folder), str(tmp_path / "independent"), str(tmp_path / "states")]) == 0
    )
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert lines[0] == ["", "asked", "target", "independent", "states", "states, records"]
    assert lines[2:] == [
        ["letters", "1", "1", "1", "1", "1"],
        ["counting", "1", "0", "0", "0", "0"],
        ["all", "2", "1", "1", "1", "1"],
        ["where the target is right", "1", "1", "1", "1", "1"],
    ]
