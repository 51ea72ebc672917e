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
    """Export with dynamic lengths through `torch.export`; written to `path`, weights beside it."""
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
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    transposed = {
        node.output[0]
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in weights
    }
    products = [node for node in graph.node if node.op_type == "MatMul"]
    if any(transposed.intersection(product.input) for product in products):
        raise MoaError(
            "weights of the exported layers are turned at run time: no quantizer would find them"
        )


def _example(spec: GraphSpec) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Arguments with distinct sizes, all above 1: `torch.export` treats sizes 0 and 1 as constants."""
    sizes = {"T": 5, "N": 3, "P": 7, "R": 4, "P+T": 12}
    dims: dict[str, Any] = {
        name: Dim(name, min=0 if name == "P" else 1, max=2**20) for name in "TNPR"
    }
    dims["P+T"] = Dim.AUTO
    args = {
        name: torch.randn([size if isinstance(size, int) else sizes[size] for size in shape])
        for name, shape in spec.inputs.items()
    }
    args |= {"positions": torch.arange(7, 12).unsqueeze(0), "queries": torch.tensor([0, 2, 4])}
    if spec.features:
        args["feature_rows"] = torch.tensor([-1, 0, 6, 2, -1])
    shapes = [
        {at: dims[size] for at, size in enumerate(of) if isinstance(size, str)}
        for of in spec.inputs.values()
    ]
    return tuple(args.values()), (*shapes[:4], tuple(shapes[4:]))
