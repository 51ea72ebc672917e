"""The device's tests that need no verifier also pass where torch cannot be imported, as on a phone: of those in virtual
time, which take long, one file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NEEDS_A_VERIFIER = re.compile(r"(tests\.(edge import kit|edge\.kit|edge\.serve\.pair|torture|verifier))|cloud_verifier")
NEEDS_A_REFERENCE = re.compile(r"^from (transformers|moa\.model)", re.MULTILINE)
WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is blocked")

sys.meta_path.insert(0, Blocked())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_what_needs_no_verifier_needs_no_torch() -> None:
    sources = {path: path.read_text() for path in HERE.rglob("test_*.py") if path != Path(__file__)}
    one = HERE / "turn" / "test_machine.py"
    files = [
        path
        for path, text in sources.items()
        if not NEEDS_A_VERIFIER.search(text) and not NEEDS_A_REFERENCE.search(text) and path.parent != one.parent
    ]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *quiet, *map(str, [*files, one])],
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 200
