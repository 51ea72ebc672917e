"""The experiment of families runs, goes on where it was ended, and makes a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.device import families
from testing import gguf_tiny


def test_it_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_tiny.need_llama()
    small = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
    models = {"qwen3": families.Model("qwen3", "a tiny one", small)}
    monkeypatch.setattr(families, "MODELS", models)
    options = families.Options(families=("qwen3",), folder=str(tmp_path))
    first = families.measure(options)
    (found,) = first["models"]
    assert found["ours_1_of_1"] > 0
    assert found["llama_8_of_2"] > 0
    assert found["memory"]["own"] > found["bundle_bytes"] > 0
    monkeypatch.setattr(families, "_measured", None)  # nothing is measured again
    assert families.measure(options) == first
    assert families.tables(first).count("a tiny one") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
