"""optimum's quantizer, where it is installed (`make optimum`), gives the bits of ONNX Runtime's: which
of the two made a bundle makes no difference to a device."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from export.forms import (
    Workshop,
    int8_by_onnxruntime,
    int8_by_optimum,
    int8_layers,
    products_of_activations,
)
from export.kinds import OPSET
from tests.export.conftest import Pair

pytest.importorskip("optimum.onnxruntime.quantization", exc_type=ImportError)


def contents(path: Path) -> tuple[list[str], dict[str, bytes]]:
    """A model's operators in order, and its weights."""
    graph = onnx.load(path).graph
    weights = {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer}
    return [node.op_type for node in graph.node], weights


@pytest.mark.parametrize("cpu", ["avx2", "avx512_vnni"])
def test_both_quantizers_give_the_same_bits(cpu: str, tied_pair: Pair, tmp_path: Path) -> None:
    layers = Workshop(tied_pair.source(), tmp_path / "work", top_k=8).layers(OPSET)
    skip = products_of_activations(onnx.load(layers, load_external_data=False))
    (tmp_path / "optimum").mkdir()
    (tmp_path / "alone").mkdir()
    theirs, maker = int8_by_optimum(layers, tmp_path / "optimum", cpu, skip)
    ours, _ = int8_by_onnxruntime(layers, tmp_path / "alone", cpu, skip)
    assert contents(theirs) == contents(ours)
    assert maker == f"optimum.onnxruntime.ORTQuantizer ({cpu})"


def test_optimum_is_used_where_it_is_installed(tied_pair: Pair, tmp_path: Path) -> None:
    layers = Workshop(tied_pair.source(), tmp_path / "work", top_k=8).layers(OPSET)
    (tmp_path / "made").mkdir()
    assert "optimum" in int8_layers(layers, tmp_path / "made", "avx2")[1]
