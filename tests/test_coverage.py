"""The floor of `make cover`: fewer covered lines than it allows end the run with an error."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
REPORT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]
_TEST = """
from counted import tell

def test_what_is_covered():
    assert tell() == "one"
"""


def _module(uncovered: int) -> str:
    """A module whose first function the test runs, and another one of so many lines."""
    lines = "".join(f"    number += {step}\n" for step in range(uncovered))
    other = f"def other(number):\n{lines}    return number\n" if uncovered else ""
    return f'def tell():\n    return "one"\n{other}'


@pytest.mark.parametrize(("uncovered", "code"), [(0, 0), (400, 1)])
def test_a_run_below_the_floor_fails(uncovered: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(_module(uncovered))
    (tmp_path / "test_it.py").write_text(_TEST)
    (tmp_path / "coverage.toml").write_text(
        f"[tool.coverage.report]\nfail_under = {REPORT['fail_under']}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--cov=counted", "--cov-config=coverage.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("FAIL Required test coverage" in done.stdout) == bool(code), done.stdout


def test_the_forge_runs_the_verb_that_has_the_floor() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "make cover" in steps
    verb = (ROOT / "Makefile").read_text().partition("\ncover:")[2].partition("\n\n")[0]
    assert "--cov " in verb
    assert "--cov-fail-under" not in verb, "the floor is in pyproject.toml"
