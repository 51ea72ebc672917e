"""Quantized forms are smaller, close to float32, and store what is equal once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from export.forms import BLOCKS, Blocks, Workshop, products_of_activations
from export.kinds import OPSET
from export.runner import OrtRunner, TorchRunner, random_steps
from export.storage import WeightedModel
from export.tables import BlockTable, FloatTable, Int8Table, UnpackedTable
from moa.errors import UsageError
from moa.graph.step import open_session
from tests.export.conftest import Pair, saturates


@pytest.fixture(scope="module")
def shop(tied_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tied_pair.source(), tmp_path_factory.mktemp("forms"), top_k=8)


def worst(shop: Workshop, model: Path) -> float:
    """Largest difference of a top log-probability from torch."""
    reference = TorchRunner(shop.source, 8)
    runner = OrtRunner(model, shop.source.spec)
    steps = random_steps(shop.source.spec, shop.source.vocabulary)
    return max(
        float(np.abs(runner.step(step).top_logp - reference.step(step).top_logp).max())
        for step in steps
    )


@pytest.mark.parametrize(
    "cpu",
    [
        "avx2",
        pytest.param(
            "avx512_vnni", marks=pytest.mark.skipif(saturates(), reason="no 8-bit products")
        ),
    ],
)
def test_int8_is_close_and_a_quarter_of_the_size(cpu: str, tied_pair: Pair, tmp_path: Path) -> None:
    shop = Workshop(tied_pair.source(), tmp_path / "work", top_k=8, int8_cpu=cpu)
    graph, _ = shop.int8_graph(OPSET)
    exact = sum(value.nbytes for value in shop.float_graph(OPSET).weights.values())
    unpacked = shop.unpacked_graph(OPSET)
    assert (
        worst(shop, unpacked.save_whole(tmp_path / "unpacked.onnx")[0]) < 1.0
    )  # random weights, wide logits
    assert sum(value.nbytes for value in unpacked.weights.values()) < 0.3 * exact
    assert not {node.op_type for node in unpacked.proto.graph.node} & {
        "MatMulInteger",
        "DynamicQuantizeLinear",
    }
    files = graph.save(tmp_path / "model.onnx")
    assert worst(shop, files[0]) < 1.0  # random weights, wide logits
    assert files[1].stat().st_size < 0.35 * exact
    kinds = {node.op_type for node in graph.proto.graph.node}
    assert "MatMul" not in kinds
    assert "Attention" in kinds


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_four_bits_run_on_the_fast_path(shop: Workshop, blocks: Blocks, tmp_path: Path) -> None:
    graph = shop.block_graph(OPSET, blocks)
    files = graph.save(tmp_path / "model.onnx")
    assert worst(shop, files[0]) < 3.0
    products = [node for node in graph.proto.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 13
    for node in products:
        assert onnx.helper.get_node_attr_value(node, "accuracy_level") == 4
    assert {node.op_type for node in graph.proto.graph.node} >= {
        "GatherBlockQuantized",
        "Attention",
    }


def test_a_tied_table_is_stored_once(shop: Workshop, tmp_path: Path) -> None:
    blocks = Blocks(32, 4)
    shop.block_graph(OPSET, blocks).save(tmp_path / "tied.onnx")
    data = (tmp_path / "tied.onnx.data").read_bytes()
    table = BlockTable("t", shop.source.embedding(), bits=4, block=32)
    assert data.count(table.codes.tobytes()) == 1
    shop.float_graph(OPSET).save(tmp_path / "float.onnx")
    data = (tmp_path / "float.onnx.data").read_bytes()
    assert data.count(shop.source.embedding().tobytes()) == 1


def _embedded(
    table: FloatTable | Int8Table | BlockTable, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """All rows as the table's graph gathers them, and its products with the unit vectors: the same
    matrix twice."""
    text = f"""<ir_version: 10, opset_import: ["": {OPSET}]>
        g (int64[1, T] ids, float[1, N, 24] hidden) => (float[] rows, float[] logits) {{}}"""
    model = WeightedModel(onnx.parser.parse_model(text))
    table.embed(model, "ids", "rows")
    table.project(model, "hidden", "logits")
    model.save(folder / "t.onnx")
    rows, logits = open_session(folder / "t.onnx").run(
        ["rows", "logits"],
        {"ids": np.arange(40)[None], "hidden": np.eye(24, dtype=np.float32)[None]},
    )
    return rows[0], logits[0].T


@pytest.mark.parametrize(
    ("table", "tolerance"),
    [
        (FloatTable, 1e-6),
        (Int8Table, 0.02),
        (UnpackedTable, 0.02),
        (partial(BlockTable, bits=4, block=16), 0.3),
        (partial(BlockTable, bits=8, block=16), 0.02),
    ],
    ids=["float", "int8", "unpacked", "b16", "b16-8"],
)
def test_both_uses_of_a_table_see_the_same_numbers(
    table: Any, tolerance: float, tmp_path: Path
) -> None:
    matrix = np.random.default_rng(0).standard_normal(
        (40, 24), np.float32
    )  # 24 is no multiple of the block
    matrix[7] = 0.0
    rows, columns = _embedded(table("t", matrix), tmp_path)
    np.testing.assert_allclose(rows, matrix, atol=tolerance)
    np.testing.assert_allclose(columns, rows, atol=0.02)
    assert not rows[7].any()


def test_attention_over_activations_is_never_quantized(shop: Workshop) -> None:
    model = onnx.load(shop.layers(20), load_external_data=False)
    names = products_of_activations(model)
    assert len(names) == 4  # scores and values, of SA and of CA


def test_weights_beyond_protobufs_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("export.storage._LARGEST_MESSAGE", 10)
    model = WeightedModel(onnx.ModelProto(), {"w": np.zeros(8, np.float32)})
    with pytest.raises(UsageError, match="do not fit one ONNX file"):
        model.save_whole(tmp_path / "model.onnx")
