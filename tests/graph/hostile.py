"""Bundles of strangers: the embedded one, with more in its graph."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

from moa import demo

Part = tuple[list[NodeProto], list[TensorProto], str]
"""Nodes and initializers, and the name of what the guesses shall depend on."""


def _ints(name: str, values: list[int]) -> TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def _filled(name: str, shape: list[int]) -> tuple[NodeProto, TensorProto]:
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [1e-9])
    node = helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=value)
    return node, _ints(f"{name}_shape", shape)


def _chain(kind: str, first: str, times: int, *more: str) -> tuple[list[NodeProto], str]:
    nodes = []
    last = first
    for number in range(times):
        nodes.append(helper.make_node(kind, [last, *more], [f"{kind}_{number}"]))
        last = f"{kind}_{number}"
    return nodes, last


def constant_products() -> Part:
    """Minutes while it is loaded."""
    node, shape = _filled("a", [4096, 4096])
    nodes, last = _chain("MatMul", "a", 60, "a")
    return [node, *nodes], [shape], last


def products_in_each_step() -> Part:
    """Minutes for each token."""
    node, shape = _filled("a", [2048, 2048])
    nodes, last = _chain("MatMul", "scaled", 200, "scaled")
    return [node, helper.make_node("Mul", ["a", "scale"], ["scaled"]), *nodes], [shape], last


def constant_sums() -> Part:
    """4 GB while it is loaded."""
    node, shape = _filled("a", [4096, 4096])
    nodes, _ = _chain("Add", "a", 60, "a")
    names = [node.output[0] for node in nodes]
    return [node, *nodes, helper.make_node("Max", names, ["all"])], [shape], "all"


def many_constants() -> Part:
    """8 GB while it is loaded."""
    parts = [_filled(f"a{number}", [4096, 4096]) for number in range(120)]
    every = helper.make_node("Max", [f"a{number}" for number in range(120)], ["all"])
    return [*(node for node, _ in parts), every], [shape for _, shape in parts], "all"


def constant_sines() -> Part:
    """Half an hour of sines."""
    node, shape = _filled("a", [8192, 2048])
    nodes, last = _chain("Sin", "a", 4000)
    return [node, *nodes], [shape], last


def constant_convolution() -> Part:
    """One operator, for minutes."""
    image, image_shape = _filled("image", [1, 64, 512, 512])
    weight, weight_shape = _filled("weight", [64, 64, 31, 31])
    conv = helper.make_node("Conv", ["image", "weight"], ["conv"])
    return [image, weight, conv], [image_shape, weight_shape], "conv"


def one_product() -> Part:
    """A single product of 3 TFLOP while it is loaded."""
    node, shape = _filled("a", [11_000, 11_000])
    return [node, helper.make_node("MatMul", ["a", "a"], ["p"])], [shape], "p"


def expanded_product() -> Part:
    """A single product of gigabytes in each step."""
    nodes = [helper.make_node("Expand", ["scale", "many"], ["b"])]
    return (
        [*nodes, helper.make_node("MatMul", ["b", "b"], ["p"])],
        [_ints("many", [14_000] * 2)],
        "p",
    )


def sorting() -> Part:
    """200 million numbers are sorted in each step."""
    nodes = [helper.make_node("Expand", ["scale", "many"], ["b"])]
    nodes.append(helper.make_node("TopK", ["b", "count"], ["sorted", "places"]))
    return nodes, [_ints("many", [200_000_000]), _ints("count", [200_000_000])], "sorted"


def counting() -> Part:
    """16 GB of numbers."""
    scalars = {"start": 0, "end": 2_000_000_000, "by": 1}
    tensors = [helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in scalars.items()]
    nodes = [helper.make_node("Range", list(scalars), ["range"])]
    return [*nodes, helper.make_node("Cast", ["range"], ["r"], to=TensorProto.FLOAT)], tensors, "r"


def very_many_nodes() -> Part:
    """What optimizers need long for."""
    nodes, last = _chain("Neg", "scale", 150_000)
    return nodes, [], last


def huge_constant() -> Part:
    """16 GB at once."""
    node, shape = _filled("a", [2**32])
    return [node], [shape], "a"


def padded() -> Part:
    """40 GB around one number."""
    nodes = [helper.make_node("Pad", ["scale", "around"], ["b"])]
    return nodes, [_ints("around", [5_000_000_000] * 2)], "b"


def later_steps() -> Part:
    """Nothing at first; from position 80 on minutes for each token."""
    steps = [
        helper.make_node("ReduceMax", ["positions"], ["most"], keepdims=0),
        helper.make_node("Sub", ["most", "eighty"], ["beyond"]),
        helper.make_node("Clip", ["beyond", "zero", "one"], ["late"]),
        helper.make_node("Mul", ["late", "size"], ["some"]),
        helper.make_node("Add", ["some", "least"], ["side"]),
        helper.make_node("Concat", ["side", "side"], ["shape"], axis=0),
        helper.make_node("Expand", ["scale", "shape"], ["b"]),
    ]
    scalars = {"eighty": 80, "zero": 0, "one": 1}
    tensors = [helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in scalars.items()]
    nodes, last = _chain("MatMul", "b", 400, "b")
    return [*steps, *nodes], [*tensors, _ints("size", [2048]), _ints("least", [1])], last


LOADED: tuple[Callable[[], Part], ...] = (
    constant_products,
    products_in_each_step,
    constant_sums,
    many_constants,
    constant_sines,
    constant_convolution,
    one_product,
    expanded_product,
    sorting,
    counting,
    very_many_nodes,
    huge_constant,
    padded,
)
"""What a trial refuses."""


def make(folder: Path, part: Part | None = None) -> Path:
    """A bundle whose guesses depend on this part, too; without one an honest bundle."""
    shutil.copytree(demo.paths().bundle, folder)
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for name, variant in list(manifest["variants"].items()):
        if name != "web":
            for inside in variant["files"]:
                manifest["files"].pop(inside)
            del manifest["variants"][name]
    manifest["default_variant"] = "web"
    model = folder / "variants/web/model.onnx"
    if part is not None:
        model.write_bytes(_with(model, *part))
    content = model.read_bytes()
    about = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest["files"]["variants/web/model.onnx"] = about
    file.write_text(json.dumps(manifest))
    return folder


def _with(file: Path, nodes: list[NodeProto], tensors: list[TensorProto], last: str) -> bytes:
    model = onnx.load(file)
    for node in model.graph.node:
        node.output[:] = ["scores" if name == "top_logp" else name for name in node.output]
    nothing = helper.make_tensor("nothing", TensorProto.FLOAT, [], [0.0])
    ends = [
        helper.make_node("ReduceMax", [last], ["most_of_all"], keepdims=0),
        helper.make_node("Mul", ["most_of_all", "nothing"], ["none"]),
        helper.make_node("Add", ["scores", "none"], ["top_logp"]),
    ]
    model.graph.node.extend([*nodes, *ends])
    model.graph.initializer.extend([*tensors, nothing])
    content: bytes = model.SerializeToString()
    return content
