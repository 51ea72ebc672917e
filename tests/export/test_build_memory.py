"""A build takes as much memory of its own as its plan says: weights that nobody reads now lie in
files."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from export.build import build
from export.forms import BLOCKS, Workshop
from export.kinds import OPSET
from export.mapped import move_to_file
from export.parity import _InDouble, compare
from export.plan import make_plan
from export.runner import TorchRunner
from export.source import Source, load_source
from export.storage import WeightedModel
from moa.errors import UsageError
from moa.process.memory import give_back_free_memory
from testing.tiny import save_tiny
from tests.export.conftest import Pair, settings_for

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")


def own_bytes() -> int:
    """Memory that this process has of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the system tells no RssAnon")


class Peak:
    """The most memory of this process while something is done, beyond what it had before."""

    def __init__(self) -> None:
        self.before = own_bytes()
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, own_bytes() - self.before)


@contextlib.contextmanager
def watched() -> Iterator[Peak]:
    """Yield a peak that another thread looks at all the time."""
    give_back_free_memory()
    peak = Peak()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            peak.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@on_linux
def test_a_graph_is_made_and_compared_without_a_copy_of_its_weights(tmp_path: Path) -> None:
    model = save_tiny(
        "llama",
        tmp_path / "model",
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
    )
    source = load_source(str(model), f"independent:{model}", tmp_path)
    shop = Workshop(source, tmp_path / "work", top_k=4)
    shop.layers(OPSET)  # of this the tests keep a copy
    with watched() as making:
        shop.float_graph(OPSET).save(tmp_path / "model.onnx")
    with watched() as comparing:
        compare(TorchRunner(source, 4), tmp_path / "model.onnx", None)
    with watched() as quantizing:
        shop.block_graph(OPSET, BLOCKS[0]).save(tmp_path / "int4.onnx")
    weights = 4 * sum(weight.numel() for weight in source.module.parameters())
    assert making.most < 0.5 * weights
    assert comparing.most < weights
    assert quantizing.most < weights


def test_a_table_is_not_made_wider_as_a_whole() -> None:
    table = torch.ones(4, 2)
    with _InDouble():
        part = table.detach()
    assert part.data_ptr() == table.data_ptr()


def test_a_build_keeps_its_weights_on_its_disk(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where temporary files are: that may be in memory."""
    folders: list[Path] = []

    def spy(target: str, drafter: str, work: Path) -> Source:
        folders.append(work.parent)
        raise UsageError("seen")

    monkeypatch.setattr("export.build.load_source", spy)
    with pytest.raises(UsageError, match="seen"):
        build(settings_for(pair, tmp_path / "bundle"))
    assert folders == [tmp_path]


def test_the_plan_tells_variants_that_take_more_memory(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 48, "num_hidden_layers": 1}
    folder = save_tiny("llama", tmp_path / "model", **wide)
    deep = save_tiny("llama", tmp_path / "deep", hidden_size=64, num_hidden_layers=8)

    def per_weight(model: Path, *variants: str) -> float:
        plan = make_plan(str(model), f"independent:{model}", variants, None)
        return (plan.memory - 400_000_000) / plan.weights

    assert per_weight(folder, "cpu-int4") == pytest.approx(4.4, abs=0.01)
    assert per_weight(folder, "cpu-int4", "cpu-fp32") == pytest.approx(8.0, abs=0.01)
    assert per_weight(folder, "cpu-int8") == pytest.approx(8.0, abs=0.01)
    assert 11 < per_weight(deep, "cpu-int8") < 13


@on_linux
def test_the_plan_holds_where_the_head_has_most_of_the_weights(tmp_path: Path) -> None:
    """Gemma 3 270M took 2.9 GB, and 1.6 were planned."""
    sizes = {"hidden_size": 384, "vocab_size": 30_000, "num_hidden_layers": 2}
    model = save_tiny("gemma3", tmp_path / "model", tie_word_embeddings=True, **sizes)
    plan = make_plan(str(model), f"independent:{model}", ("cpu-int4",), None)
    source = load_source(str(model), f"independent:{model}", tmp_path)
    Workshop(source, tmp_path / "work", top_k=4).float_graph(OPSET).save(tmp_path / "model.onnx")
    with watched() as comparing:
        compare(TorchRunner(source, 4), tmp_path / "model.onnx", None)
    assert 0.5 * (plan.memory - 400_000_000) < comparing.most < plan.memory - 400_000_000


class Tied(nn.Module):
    """Two layers with one weight, and a weight that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = nn.Parameter(self.one.weight.detach())
        self.turned = nn.Parameter(torch.randn(8, 4).T)
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))


@pytest.mark.skipif(sys.platform == "win32", reason="weights stay in memory there")
def test_weights_in_a_file_are_the_same_and_share_memory_as_before(tmp_path: Path) -> None:
    module = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    addresses = [value.data_ptr() for value in module.parameters()]
    move_to_file(module, tmp_path)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.dtype == before[name].dtype
    assert module.one.weight.data_ptr() == module.other.weight.data_ptr()
    moved = [value.data_ptr() for value in module.parameters()]
    assert not {*moved} & {*addresses}
    assert not [*tmp_path.iterdir()], "the file has no name"


def test_a_graphs_weights_are_mapped_from_their_file(tmp_path: Path) -> None:
    large = np.arange(2000, dtype=np.float32)
    text = f'<ir_version: 10, opset_import: ["": {OPSET}]> g (float[1] x) => (float[1] x) {{}}'
    made = WeightedModel(onnx.parser.parse_model(text))
    made.constant("large", large)
    made.constant("small", np.arange(3))
    made.save(tmp_path / "model.onnx")
    read = WeightedModel.read(tmp_path / "model.onnx")
    assert [tensor.name for tensor in read.proto.graph.initializer] == ["small"]
    assert [*read.weights] == ["large"]
    assert np.array_equal(read.weights["large"], large)
    assert is_mapped(read.weights["large"])


def is_mapped(array: Any) -> bool:
    """Whether an array's memory is a file's."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)
