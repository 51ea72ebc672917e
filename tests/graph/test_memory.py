"""A graph that asks for more memory than a drafter needs fails before it has it, whatever operator
asks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from moa import demo

_MANY = 1_000_000_000
_WITHIN = 1300
"""Megabytes: a step's limit, and those of the bundle. Without it 4 GB and more are taken."""
_RUN = """
import resource, sys
from pathlib import Path
from moa.errors import BundleError
from moa.graph.drafter import OnnxDrafter, run
from moa.graph.step import StepGraph
from moa.sampling import SamplingSettings
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
try:
    drafter = OnnxDrafter(StepGraph(Path(sys.argv[1]), threads=1), vocab_size=512)
    print("guess", run(drafter.guess([5, 6, 7], SamplingSettings())))
except BundleError as error:
    print(error)
# Of this program alone: what getrusage tells begins with the parent's.
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
"""


GREEDY: dict[str, Sequence[NodeProto]] = {
    "nothing": [helper.make_node("Identity", ["scale"], ["big"])],
    "Expand": [helper.make_node("Expand", ["scale", "many"], ["big"])],
    "ConstantOfShape": [helper.make_node("ConstantOfShape", ["many"], ["big"])],
    "Concat, again and again": [
        helper.make_node(
            "Concat", [f"c{n}" if n else "scale"] * 2, [f"c{n + 1}" if n < 33 else "big"], axis=0
        )
        for n in range(34)
    ],
}


def greedy(nodes: Sequence[NodeProto]) -> bytes:
    """The embedded drafter, whose scores depend on something big, too."""
    model = onnx.load(demo.paths().bundle / "variants/web/model.onnx")
    for node in model.graph.node:
        node.output[:] = ["scores" if name == "top_logp" else name for name in node.output]
    model.graph.node.extend(nodes)
    model.graph.node.append(helper.make_node("ReduceMax", ["big"], ["most"], keepdims=0))
    model.graph.node.append(helper.make_node("Add", ["scores", "most"], ["top_logp"]))
    model.graph.initializer.append(helper.make_tensor("many", TensorProto.INT64, [1], [_MANY]))
    return model.SerializeToString()


@pytest.mark.parametrize("kind", GREEDY)
def test_memory_is_bounded_before_it_is_taken(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(greedy(GREEDY[kind]))
    command = [sys.executable, "-c", _RUN, str(tmp_path / "model.onnx")]
    said, megabytes = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert int(megabytes) < _WITHIN
    if kind == "nothing":
        assert said.startswith("guess")
    else:
        assert said.startswith("the drafter's graph failed, with at most 1")
