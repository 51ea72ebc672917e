"""Drafts by utility on targets whose forwards cost unlike amounts."""

from __future__ import annotations

import pytest

from benchmarks.server import utility


def test_every_target_says_its_own_text_at_every_rate() -> None:
    pytest.importorskip("accelerate")
    options = utility.Options(hidden=64, layers=2, rates=(0.9,), prompts=1, tokens=12, repeats=1, level_ms=0.0)
    result = utility.measure(options)
    assert result["faults"] == 0
    assert len(result["runs"]) == 4
    assert all(run["plain"] > 0 and run["won"] >= 1 and len(run["forward_ms"]) == 4 for run in result["runs"])
    table = utility.tables(result)
    assert table.count("\n| ") == 1 + 4
    assert "Mixtral" in table
