"""The drafter's layers as one ONNX graph: everything between the embedding and the head, traced from
`Drafter.graph_module`.

    x, positions ──► new cache rows, of every token and layer
    queries      ──► the tokens whose predictions are wanted; only these run through the last layer's attention, and on

A prompt is therefore a step with one query: no second graph, and little wasted work. With borrowed layers (TLI) every
token needs its states, so there the queries are selected after the last layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from export.storage import quiet
from moa.drafters.graph import GraphSpec
from moa.errors import MoaError


def export_body(body: nn.Module, spec: GraphSpec, path: Path, *, opset: int) -> None:
    """Export a drafter's layers, without embedding and head, as an ONNX graph whose lengths may
    vary. It is written to `path`, with its weights beside it. A `MoaError` if the exporter has
    written weights in a form that no quantizer finds."""
    args, shapes = _example(spec)
    with torch.inference_mode(), quiet():
        program = torch.onnx.export(
            body.eval().float(),
            args,
            dynamo=True,
            opset_version=opset,
            input_names=list(spec.inputs),
            output_names=["hidden", *spec.rows],
            dynamic_shapes=shapes,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    _refuse_transposed_weights(onnx.load(path, load_external_data=False).graph)


def _refuse_transposed_weights(graph: onnx.GraphProto) -> None:
    """Raise a `MoaError` if a matrix product multiplies by a weight that a Transpose node turns at
    run time: quantizers look for products that take a weight itself."""
    weights = {tensor.name for tensor in graph.initializer}
    transposed = set()
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in weights:
            transposed.add(node.output[0])
    for node in graph.node:
        if node.op_type == "MatMul" and not transposed.isdisjoint(node.input):
            raise MoaError(
                "weights of the exported layers are turned at run time: no quantizer would find them"
            )


def _example(spec: GraphSpec) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Returns arguments to trace the layers with, and which of their sizes may change. The sizes
    are distinct and above 1, because `torch.export` takes 0 and 1 for constants."""
    # Tokens, queries, past cache rows, records, and all rows of the cache after the step.
    sizes = {"T": 5, "N": 3, "P": 7, "R": 4, "P+T": 12}
    dims: dict[str, Any] = {
        "T": Dim("T", min=1, max=2**20),
        "N": Dim("N", min=1, max=2**20),
        "P": Dim("P", min=0, max=2**20),  # a text begins without past rows
        "R": Dim("R", min=1, max=2**20),
        "P+T": Dim.AUTO,
    }
    args: dict[str, Tensor] = {}
    dynamic: list[dict[int, Any]] = []  # of each argument, the axes whose sizes may change
    for name, shape in spec.inputs.items():
        args[name] = torch.randn([sizes[size] if isinstance(size, str) else size for size in shape])
        dynamic.append({axis: dims[size] for axis, size in enumerate(shape) if size in dims})
    args["positions"] = torch.arange(sizes["P"], sizes["P+T"]).unsqueeze(0)
    args["queries"] = torch.tensor([0, 2, 4])
    if spec.features:
        args["feature_rows"] = torch.tensor([-1, 0, 6, 2, -1])
    # The first four are arguments of their own, the others are collected by `*`.
    return tuple(args.values()), (*dynamic[:4], tuple(dynamic[4:]))
