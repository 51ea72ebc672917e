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
from moa.manifest import KVHeads
from moa.model.drafter import Drafter


class Body(nn.Module):
    """The drafter's `states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.borrowed = drafter, drafter.borrowed
        self.records = 3 if drafter.config.use_ca else 0

    def forward(self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """`rest`: record_k, record_v, record_mask where there are records, then past keys and values by layer."""
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

    @property
    def inputs(self) -> list[str]:
        """Names of the graph's inputs, in order."""
        records = ["record_k", "record_v", "record_mask"] if self.records else []
        past = [f"past_{kind}_{i}" for i in range(len(self.cache)) for kind in "kv"]
        return ["x", "positions", "queries", "mask", *records, *past]

    @property
    def outputs(self) -> list[str]:
        """Names of the graph's outputs, in order."""
        return ["hidden", *(f"new_{kind}_{i}" for i in range(len(self.cache)) for kind in "kv")]


def export_body(body: nn.Module, spec: BodySpec, path: Path, *, opset: int) -> onnx.ModelProto:
    """Export with dynamic lengths through `torch.export`; written to `path`, weights beside it, and returned."""
    args, shapes = _example(spec)
    with torch.inference_mode(), quiet():
        program = torch.onnx.export(
            body.eval().float(),
            args,
            dynamo=True,
            opset_version=opset,
            input_names=spec.inputs,
            output_names=spec.outputs,
            dynamic_shapes=shapes,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    return onnx.load(path)


def _example(spec: BodySpec) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Arguments with distinct sizes, all above 1: `torch.export` treats sizes 0 and 1 as constants."""
    tokens, past, records = 5, 7, 4
    t, n, p, r = (Dim(name, min=least, max=2**20) for name, least in (("T", 1), ("N", 1), ("P", 0), ("R", 1)))
    args: list[Tensor] = [
        torch.randn(1, tokens, spec.hidden_size),
        torch.arange(past, past + tokens).unsqueeze(0),
        torch.tensor([0, 2, 4]),
        torch.zeros(1, 1, tokens, past + tokens),
    ]
    shapes: list[Any] = [{1: t}, {1: t}, {0: n}, {2: t, 3: Dim.AUTO}]
    rest: list[tuple[Tensor, Any]] = []
    if spec.records:
        of = spec.records
        rest += [(torch.randn(1, of.kv_heads, records, of.head_dim), {2: r}) for _ in range(2)]
        rest += [(torch.zeros(1, 1, 1, records), {3: r})]
    for layer in spec.cache:
        rest += [(torch.randn(1, layer.kv_heads, past, layer.head_dim), {2: p}) for _ in range(2)]
    return (*args, *(arg for arg, _ in rest)), (*shapes, tuple(shape for _, shape in rest))
