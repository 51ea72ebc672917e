"""What the drafter of streams takes is planned before it is loaded: never less than it then takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloud_verifier import model
from cloud_verifier.drafter_memory import drafter_memory
from cloud_verifier.settings import Settings
from edge_client.device import embedded_bundle
from moa.bundle import Bundle
from moa.drafters.registry import find
from moa.gguf.reader import read_head
from moa.graph.drafter import run
from moa.graph.load import LoadedGraph
from moa.target.contract import LoadOptions
from moa.target.loading import load_model
from moa.target.memory_plan import DrafterMemory
from testing import gguf_tiny
from testing.tiny import tiny
from tests.edge.kit import pair


def test_a_graph_s_cache_takes_no_more_than_planned() -> None:
    bundle = Bundle.open(embedded_bundle())
    planned = drafter_memory(bundle=str(embedded_bundle()))
    drafter = LoadedGraph.load(bundle).drafter()
    tokens = 600  # the arrays have grown, to less than twice that
    run(drafter.read([5] * tokens))
    cached = sum(array.nbytes for array in drafter._rows.arrays)
    records: Any = drafter.records
    rows = np.zeros((tokens, records.wire.count, records.wire.width), np.float32)
    records.put(0, rows, rows)
    held = sum(
        array.nbytes for part in (records._rows, records._borrowed_rows) for array in part.arrays
    )
    assert 0.4 * planned.per_token * tokens < cached + held <= planned.per_token * tokens
    assert planned.at_start == bundle.variant().size


def test_a_file_takes_its_size(tmp_path: Path) -> None:
    file = gguf_tiny.save(tiny("qwen2"), tmp_path / "small.gguf")
    planned = drafter_memory(file=str(file))
    head = read_head(file)
    heads = head.number("{arch}.attention.head_count_kv")
    width = head.number("{arch}.embedding_length") // head.number("{arch}.attention.head_count")
    assert planned.at_start == file.stat().st_size
    assert planned.per_token == 2 * head.number("{arch}.block_count") * heads * width * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_s_weights_take_what_they_take_in_the_target_s_precision(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = find(pair() / "drafter")
    target = load_model(pair() / "target", dtype=dtype)
    loaded: Any = stored.load(target.model, target.facts)
    own = sum(value.nbytes for value in loaded.state_dict().values())
    planned = drafter_memory(folders=[stored.folder, stored.folder], dtype=dtype)
    assert planned == DrafterMemory(at_start=own)
    # Those of a GGUF file are unpacked.
    small = tiny("qwen2")
    file = gguf_tiny.save(small, tmp_path / "small.gguf", kind="Q8_0")
    numbers = sum(value.numel() for value in small.state_dict().values())
    planned = drafter_memory(folders=[file], dtype=dtype)
    assert planned == DrafterMemory(at_start=numbers * dtype.itemsize)


def test_the_target_is_planned_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        pass

    def plan(source: str, options: LoadOptions, drafter: DrafterMemory) -> Any:
        folders = [model._embedded().drafter]
        assert drafter == drafter_memory(bundle=str(embedded_bundle()), folders=folders)
        raise Planned

    monkeypatch.setattr(model, "plan_memory", plan)
    with pytest.raises(Planned):
        model.load(Settings())
