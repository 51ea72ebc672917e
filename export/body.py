"""The drafter's layers as one ONNX graph: everything between the embedding and the head, traced from `Drafter` itself.

    x, positions ──► new cache rows, of every token and layer
    queries      ──► the tokens whose predictions are wanted; only these run through the last layer's attention, and on

A prompt is therefore a step with one query: no second graph, and little wasted work. With borrowed layers (TLI) every
token needs its states, so there the queries are selected after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from export.storage import quiet
from moa.errors import MoaError
from moa.manifest import KVHeads
from moa.model.drafter import Drafter
from moa.model.state_drafter import StateDrafter

Sizes = tuple[int | str, ...]
"""Sizes, and names of those that a step may choose."""


class Body(nn.Module):
    """The drafter's `states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Drafter | StateDrafter) -> None:
        super().__init__()
        self.drafter = drafter
        if isinstance(drafter, Drafter):
            self.borrowed = drafter.borrowed
            self.records = 3 * drafter.config.use_ca

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """`rest`: record_k, record_v, record_mask where there are records, feature_rows in a
        drafter of states, then past keys and values by layer."""
        if isinstance(self.drafter, StateDrafter):
            pairs = list(zip(rest[1::2], rest[2::2], strict=True))
            x, rows = self.drafter.states(
                x, positions, mask, pairs, feature_rows=rest[0], queries=queries
            )
        else:
            records, past = rest[: self.records], rest[self.records :]
            pairs = list(zip(past[0::2], past[1::2], strict=True))
            x, rows = self.drafter.states(x, positions, mask, pairs, *records, queries=queries)
        return x, *(tensor for layer in rows for tensor in layer)


@dataclass(frozen=True)
class BodySpec:
    """What an exporter must know about a body besides its modules."""

    hidden_size: int
    cache: tuple[KVHeads, ...]
    """The body's layers, then the borrowed ones."""
    records: KVHeads | None
    borrowed: int = 0
    """How many of these, the last ones, records carry the rows of."""
    features: bool = False
    """Whether each token reads a feature from the last layer of the cache."""

    @property
    def inputs(self) -> dict[str, Sizes]:
        """The graph's inputs, in order: T tokens, N queries, P past rows, R records."""
        shapes: dict[str, Sizes] = {
            "x": (1, "T", self.hidden_size),
            "positions": (1, "T"),
            "queries": ("N",),
        }
        shapes["mask"] = (1, 1, "T", "P+T")
        if (of := self.records) is not None:
            shapes |= dict.fromkeys(("record_k", "record_v"), (1, of.kv_heads, "R", of.head_dim))
            shapes["record_mask"] = (1, 1, 1, "R")
        if self.features:
            shapes["feature_rows"] = ("T",)
        return shapes | self._cached("past", "P")

    @property
    def rows(self) -> dict[str, Sizes]:
        """Its outputs besides the states: new cache rows, in the order of the past ones."""
        return self._cached("new", "T")

    def _cached(self, what: str, rows: str) -> dict[str, Sizes]:
        layers = enumerate(self.cache)
        return {
            f"{what}_{kind}_{i}": (1, of.kv_heads, rows, of.head_dim)
            for i, of in layers
            for kind in "kv"
        }


def export_body(body: nn.Module, spec: BodySpec, path: Path, *, opset: int) -> None:
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
    turned = {
        node.output[0]
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in weights
    }
    if any(turned.intersection(node.input) for node in graph.node if node.op_type == "MatMul"):
        raise MoaError(
            "weights of the exported layers are turned at run time: no quantizer would find them"
        )


def _example(spec: BodySpec) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
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
