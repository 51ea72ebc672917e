"""A graph that may loop is refused before it is loaded, in whatever place the loop is."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from moa import demo
from moa.errors import BundleError
from moa.graph.control_flow import refuse_control_flow
from moa.graph.step import StepGraph


def forever() -> onnx.NodeProto:
    """2^62 additions."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [1]),
        ],
    )
    return helper.make_node("Loop", ["count", "", "scale"], ["late"], body=body)


def embedded() -> onnx.ModelProto:
    return onnx.load(demo.paths().bundle / "variants/cpu-int4/model.onnx", load_external_data=False)


def looping(where: str) -> bytes:
    """The embedded drafter with a loop in its graph, or in a function that the graph calls."""
    model = embedded()
    model.graph.initializer.append(helper.make_tensor("count", TensorProto.INT64, [], [2**62]))
    if where == "graph":
        model.graph.node.append(forever())
    elif where == "two graphs":  # a message that comes twice is merged
        extra = onnx.ModelProto()
        extra.graph.node.append(forever())
        return model.SerializeToString() + extra.SerializeToString()
    else:
        opsets = list(model.opset_import)
        function = helper.make_function("own", "Late", ["count", "scale"], ["late"], [forever()], opsets)
        model.functions.append(function)
        model.opset_import.append(helper.make_opsetid("own", 1))
        model.graph.node.append(helper.make_node("Late", ["count", "scale"], ["late"], domain="own"))
    return model.SerializeToString()


@pytest.mark.parametrize("where", ["graph", "two graphs", "function"])
def test_a_loop_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(looping(where))
    with pytest.raises(BundleError, match="has loops or branches"):
        StepGraph(tmp_path / "model.onnx")


@pytest.mark.parametrize("content", [b"", b"\xff" * 12, b"\x3a\xff\xff\xff\xff\x7f", b"\x0b", b"\x3a\x05ab"])
def test_what_is_no_graph_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BundleError, match="is not an ONNX graph"):
        refuse_control_flow(tmp_path / "model.onnx")


def test_a_loop_in_onnx_runtime_s_own_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.ort").write_bytes(b"\x08\0\0\0ORTM" + bytes(20) + b"\x04\0\0\0Loop\0")
    with pytest.raises(BundleError, match="has loops or branches"):
        refuse_control_flow(tmp_path / "model.ort")


def test_the_embedded_drafter_has_none() -> None:
    for model in (demo.paths().bundle / "variants").rglob("model.onnx"):
        refuse_control_flow(model)
