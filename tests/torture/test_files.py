"""A little of `python -m tests.torture files`: what is damaged is refused in one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moa.config import TargetFacts
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.registry import find
from moa.errors import ConfigError, UsageError
from moa.target.loading import load_model, read_facts
from testing.tiny import save_tiny


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: a child that is forked off this one hangs where a thread of another
    test, which the child has not, holds a lock."""
    found = tmp_path / "found.json"
    command = ["-m", "tests.torture", "files", "--damaged", "3", "--seed", "51", "--out", found]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = json.loads(found.read_text())["files"]["counts"]
    kinds = {kind for kind, _, _ in (name.rpartition(": ") for name in counts) if kind}
    assert {"target", "attention", "states"} <= kinds
    assert counts["files"] == 3 * len(kinds)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": []},
        {"rope_scaling": 0.5},
        {"intermediate_size": 2**63},
        {"initializer_range": 0},
        {"max_position_embeddings": "many"},
    ],
)
def test_whatever_a_config_makes_the_library_raise_is_one_line(
    change: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    said: list[str] = []
    for read in (load_model, read_facts):
        with contextlib.suppress(UsageError):  # reading the facts alone needs fewer of them
            read(folder)
            said.append(read.__name__)
    assert "load_model" not in said


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": ""},
        {"target_kv_heads": None},
        {"use_ca": {}},
        {"tli": [[]]},
        {"body": 0.5},
        {"rope_theta": "x"},
    ],
)
def test_a_drafters_config_has_the_types_that_it_says(
    change: dict[str, Any], tmp_path: Path
) -> None:
    target = save_tiny("llama", tmp_path / "target")
    facts: TargetFacts = read_facts(target)[0]
    (tmp_path / "drafter").mkdir()
    AttentionConfig.for_target(facts).write(tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=next(iter(change))):
        find(tmp_path / "drafter").config(facts)
