"""The drafter's layers as one ONNX graph: everything between the embedding and the head, made from the trained modules.

    x, positions ──► SA's new cache rows, of every token
    queries      ──► the tokens whose predictions are wanted; only they go on through attention, CA and the layers after

A prompt is therefore a step with one query: no second graph, and nothing computed that nobody asked for. With borrowed
layers (TLI) every token needs its states, so there the choice is made after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from export.quiet import quiet
from moa.manifest import Manifest
from moa.model.blocks import MASKED, rotary, rotate
from moa.model.borrowed import BorrowedLayers
from moa.model.drafter import Drafter


@dataclass(frozen=True)
class CacheLayer:
    """One layer with a cache: its heads and their width."""

    kv_heads: int
    head_dim: int


class MoaBody(nn.Module):
    """SA, CA and the borrowed layers. Same blocks, same arithmetic as `Drafter.step`; parity is tested."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.config = drafter.config
        self.self_attention = drafter.self_attention
        self.cross_attention = drafter.cross_attention if drafter.config.use_ca else None
        self.borrowed = drafter.borrowed

    def forward(self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """`rest`: record_k, record_v, record_mask, then past keys and values layer by layer."""
        record_k, record_v, record_mask, *past = rest
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        sa = self.self_attention.self_attn
        normed = self.self_attention.input_layernorm(x)
        key, value = rotate(sa.key(normed), cos, sin), sa.value(normed)
        rows = [key, value]
        seen = mask
        if self.borrowed is None:
            x, normed = x.index_select(1, queries), normed.index_select(1, queries)
            cos, sin = cos.index_select(1, queries), sin.index_select(1, queries)
            seen = mask.index_select(2, queries)
        query = rotate(sa.query(normed), cos, sin)
        found = sa.attend(query, torch.cat([past[0], key], -2), torch.cat([past[1], value], -2), seen)
        x = self.self_attention.feed_forward(x + found)
        if self.cross_attention is not None:
            ca = self.cross_attention.self_attn
            query = rotate(ca.query(self.cross_attention.input_layernorm(x)), cos, sin)
            any_visible = (record_mask.amax(-1) > MASKED / 2).to(x.dtype).transpose(-1, -2)
            visible = record_mask.expand(-1, -1, x.shape[1], -1)  # the Attention operator does not broadcast masks
            x = self.cross_attention.feed_forward(x + ca.attend(query, record_k, record_v, visible) * any_visible)
        if self.borrowed is not None:
            x, more = self.borrowed(x, positions, mask, list(zip(past[2::2], past[3::2], strict=True)))
            x = x.index_select(1, queries)
            rows += [tensor for layer in more for tensor in layer]
        return x, *rows


class IndependentBody(nn.Module):
    """All layers of a small causal language model: a drafter that needs no activations."""

    def __init__(self, layers: BorrowedLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """`past`: keys and values layer by layer."""
        x, rows = self.layers(x, positions, mask, list(zip(past[0::2], past[1::2], strict=True)))
        return x.index_select(1, queries), *(tensor for layer in rows for tensor in layer)


@dataclass(frozen=True)
class BodySpec:
    """What an exporter must know of a body besides its modules."""

    hidden_size: int
    cache: tuple[CacheLayer, ...]
    records: CacheLayer | None

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


def spec_of(manifest: Manifest) -> BodySpec:
    """The spec of a bundle's graphs."""
    cache = tuple(CacheLayer(heads.kv_heads, heads.head_dim) for heads in manifest.cache)
    records = manifest.records
    hidden = int(manifest.drafter.config["hidden_size"])
    return BodySpec(hidden, cache, CacheLayer(records.kv_heads, records.head_dim) if records else None)


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
    """Arguments of distinct sizes, all above 1: `torch.export` takes 0 and 1 for constants."""
    tokens, past, records = 5, 7, 4
    t, n, p, r = (
        Dim("T", min=1, max=2**20),
        Dim("N", min=1, max=2**20),
        Dim("P", min=0, max=2**20),
        Dim("R", min=1, max=2**20),
    )
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
