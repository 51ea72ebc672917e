"""Two processes that share every layer say what one target says, and each holds its part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny

PATIENCE = 300.0


@pytest.mark.slow  # two processes that import torch
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_processes_are_exact_and_hold_a_half_each(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module", "tests.verifier.ranks"]
    ran = subprocess.run(
        [sys.executable, *how, str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert said["same_text"]
    assert said["same_rows"], "records are made of all heads"
    assert said["shared"]["keys_and_values"] * 2 <= said["whole"]["keys_and_values"] * 1.2
    assert said["shared"]["layers"] < 0.6 * said["whole"]["layers"]
