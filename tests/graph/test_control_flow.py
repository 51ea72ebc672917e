"""A graph that may loop is refused before it is loaded, in whatever place the loop is."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from moa import demo
from moa.errors import BundleError
from moa.graph.step import StepGraph


def forever() -> onnx.NodeProto:
    """2^62 additions."""
    nodes = [
        helper.make_node("Identity", ["go"], ["again"]),
        helper.make_node("Add", ["x", "x"], ["y"]),
    ]
    kinds = {"i": TensorProto.INT64, "go": TensorProto.BOOL, "again": TensorProto.BOOL}
    i, go, x, again, y = (
        helper.make_tensor_value_info(
            name, kinds.get(name, TensorProto.FLOAT), [] if name in kinds else [1]
        )
        for name in ("i", "go", "x", "again", "y")
    )
    body = helper.make_graph(nodes, "body", [i, go, x], [again, y])
    return helper.make_node("Loop", ["count", "", "scale"], ["late"], body=body)


def looping(where: str) -> bytes:
    """The embedded drafter with a loop in its graph, or in a function that the graph calls."""
    model = onnx.load(
        demo.paths().bundle / "variants/cpu-int4/model.onnx", load_external_data=False
    )
    model.graph.initializer.append(helper.make_tensor("count", TensorProto.INT64, [], [2**62]))
    if where == "graph":
        model.graph.node.append(forever())
    elif where == "two graphs":  # a message that comes twice is merged
        extra = onnx.ModelProto()
        extra.graph.node.append(forever())
        return model.SerializeToString() + extra.SerializeToString()
    else:
        opsets = list(model.opset_import)
        function = helper.make_function(
            "own", "Late", ["count", "scale"], ["late"], [forever()], opsets
        )
        model.functions.append(function)
        model.opset_import.append(helper.make_opsetid("own", 1))
        model.graph.node.append(
            helper.make_node("Late", ["count", "scale"], ["late"], domain="own")
        )
    return model.SerializeToString()


@pytest.mark.parametrize("where", ["graph", "two graphs", "function", "ort"])
def test_a_loop_is_refused(where: str, tmp_path: Path) -> None:
    of_onnx_runtime = b"\x08\0\0\0ORTM" + bytes(20) + b"\x04\0\0\0Loop\0"
    (tmp_path / "model").write_bytes(of_onnx_runtime if where == "ort" else looping(where))
    with pytest.raises(BundleError, match="has loops or branches"):
        StepGraph(tmp_path / "model")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 12, b"\x3a\xff\xff\xff\xff\x7f", b"\x0b", b"\x3a\x05ab"]
)
def test_what_is_no_graph_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BundleError, match="is not an ONNX graph"):
        StepGraph(tmp_path / "model.onnx")
