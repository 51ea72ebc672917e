"""A target of a large one's shape, here a small one's."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks.kit.random_pair import llama
from benchmarks.server import forward, large
from moa.errors import UsageError


def test_it_is_filled_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(large.SHAPES, "tiny", llama(64, 2, 256))
    monkeypatch.setattr(large, "_BLOCK", 1000)
    model = large.filled(large.SHAPES["tiny"])
    assert all(weight.dtype == torch.bfloat16 and weight.float().std() >= 0 for weight in model.parameters())
    assert model.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.2)
    weights = 2 * model.num_parameters()
    result = {"large": large.measure("tiny", 0.0)}
    assert result["large"]["bytes"] == weights, "packed weights are the decoder's, but counted"
    assert [one["tokens"] for one in result["large"]["sizes"]] == list(large.SIZES)
    table = forward.tables(result)
    assert "tokens/s, 80% right" in table
    assert table.count("\n| ") == 2 + len(large.SIZES), "header, line, sizes"


def test_without_room_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=15 * 2**30))
    with pytest.raises(UsageError, match=r"15\.0 GiB"):
        large.filled(large.SHAPES["8b"])
