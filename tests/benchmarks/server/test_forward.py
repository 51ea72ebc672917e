"""The comparison of a verification with its bare arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.server import forward
from tests.tiny import save_tiny


def test_every_batch_is_measured_beside_the_bare_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LENGTHS", (4, 20))
    found = forward.batches(save_tiny("llama", tmp_path), forward.Options(sessions=(1, 2), tokens=(1, 3), seconds=0.0))
    assert [(one["sessions"], one["tokens"]) for one in found] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(one[name] > 0 for one in found for name in ("ms", "bare_ms", "ratio", "ratio_torch", "library_ratio"))
    table = forward.tables({"forward": {"tiny": found}})
    assert table.count("\n| ") == 2 + len(found), "header, line, batches"
    assert "| 2 x 3 |" in table
