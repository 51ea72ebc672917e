"""A fast Llama-like decoder: the tokens of all rows are packed in every linear layer, attention
runs row by row.

The library's own model is the reference, and is used for other families; the weights are the same
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention

from moa.config import TargetFacts
from moa.model.layout import Group, Layout
from moa.model.products import Product, joined, turns

PACKED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


class PackedDecoder:
    """Runs batches of any rows without padding. All shapes are known in advance, so nothing waits
    for the accelerator."""

    def __init__(
        self, model: Any, facts: TargetFacts, *, capacity: int, kinds: Sequence[str], pack: bool
    ) -> None:
        """Share the weights of a model of `PACKED_FAMILIES`, for positions below `capacity`; `pack`
        as for `joined`."""
        backbone = model.get_decoder()
        self._embedding: Tensor = backbone.embed_tokens.weight
        self._norm: Tensor = backbone.norm.weight
        self._layers = [
            _Layer(layer, facts, kind, pack=pack)
            for layer, kind in zip(backbone.layers, kinds, strict=True)
        ]
        self._turns = turns(backbone, self._embedding, capacity).unsqueeze(2)
        self._eps = facts.rms_norm_eps
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs are kept."""
        self.tapped: Tensor | None = None
        """Those of the latest forward, side by side: `[tokens, taps * hidden]`."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers from now on."""
        self.taps = tuple(layers)

    def __call__(
        self, ids: Tensor, layout: Layout, memory: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Final states `[tokens, hidden]`, after the last norm; keys and values go to the layout's
        columns."""
        cos, sin = self._turns.index_select(0, layout.positions).unbind(1)
        x = embedding(ids, self._embedding)
        inputs = {}
        for number, (layer, (keys, values)) in enumerate(zip(self._layers, memory, strict=True)):
            if number in self.taps:
                inputs[number] = x
            x = layer(x, cos, sin, layout, keys, values)
        self.tapped = torch.cat([inputs[number] for number in self.taps], -1) if inputs else None
        return rms_norm(x, x.shape[-1:], self._norm, self._eps)

    def run_first_layer(
        self, ids: Tensor, layout: Layout, memory: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """The first layer alone."""
        cos, sin = self._turns.index_select(0, layout.positions).unbind(1)
        self._layers[0](embedding(ids, self._embedding), cos, sin, layout, *memory[0])


class _Layer:
    def __init__(self, layer: Any, facts: TargetFacts, kind: str, *, pack: bool) -> None:
        attention = layer.self_attn
        self._heads = facts.heads
        self._kv_heads = facts.kv_heads
        self._width = facts.head_dim
        self._eps = facts.rms_norm_eps
        self._kind = kind
        self._scale = attention.scaling
        self._before = layer.input_layernorm.weight
        self._between = layer.post_attention_layernorm.weight
        self._qkv = joined(attention, ("q_proj", "k_proj", "v_proj"), pack=pack)
        self._out = joined(attention, ("o_proj",), pack=pack)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._head_norms = (
            None if None in norms else [norm.weight for norm in norms if norm is not None]
        )
        self._mlp = _feed_forward(layer, pack=pack)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        heads = self._heads
        kv_heads = self._kv_heads
        qkv = self._qkv(rms_norm(x, x.shape[-1:], self._before, self._eps)).view(
            len(x), -1, self._width
        )
        turned = qkv[:, : heads + kv_heads]
        if self._head_norms is not None:
            parts = turned.split([heads, kv_heads], 1)
            normed = [
                rms_norm(p, p.shape[-1:], w, self._eps)
                for p, w in zip(parts, self._head_norms, strict=True)
            ]
            turned = torch.cat(normed, 1)
        turned = torch.addcmul(turned * cos, turned.roll(self._width // 2, -1), sin)
        keys.index_copy_(0, layout.columns, turned[:, heads:])
        values.index_copy_(0, layout.columns, qkv[:, heads + kv_heads :])
        x = x + self._out(self._attend(turned[:, :heads], layout.groups, keys, values))
        return x + self._mlp(rms_norm(x, x.shape[-1:], self._between, self._eps))

    def _attend(
        self, query: Tensor, groups: Sequence[Group], keys: Tensor, values: Tensor
    ) -> Tensor:
        if len(groups) == 1 and isinstance(groups[0].tokens, slice):
            return self._attend_group(query, groups[0], keys, values)
        seen = query.new_empty(len(query), self._heads * self._width)
        for group in groups:
            found = self._attend_group(query, group, keys, values)
            if isinstance(group.tokens, slice):
                seen[group.tokens] = found
            else:
                seen.index_copy_(0, group.tokens, found)
        return seen

    def _attend_group(self, query: Tensor, group: Group, keys: Tensor, values: Tensor) -> Tensor:
        mine = query[group.tokens] if group.picks is None else query.index_select(0, group.picks)
        # The query heads of a group become rows of one product with the key head that they share.
        shape = group.rows, group.width, self._kv_heads, self._heads // self._kv_heads, self._width
        mine = (
            mine.view(shape)
            .permute(0, 2, 3, 1, 4)
            .reshape(group.rows, self._kv_heads, -1, self._width)
        )
        mask = group.masks[self._kind]
        found = scaled_dot_product_attention(
            mine, group.read(keys), group.read(values), mask, scale=self._scale
        )
        found = found.view(group.rows, self._kv_heads, -1, group.width, self._width).permute(
            0, 3, 1, 2, 4
        )
        found = found.reshape(group.rows * group.width, -1)
        return found if group.real is None else found.index_select(0, group.real)


def _feed_forward(layer: Any, *, pack: bool) -> Product:
    """SwiGLU with its two halves in one product; what is no SwiGLU (a mixture of experts) is the
    library's own."""
    mlp = getattr(layer, "mlp", None)
    if mlp is None or not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        experts = mlp if mlp is not None else layer.block_sparse_moe

        def mixture(x: Tensor) -> Tensor:
            found = experts(x.unsqueeze(0))
            return (found[0] if isinstance(found, tuple) else found).squeeze(0)

        return mixture
    both = joined(mlp, ("gate_proj", "up_proj"), pack=pack)
    down = joined(mlp, ("down_proj",), pack=pack)
    act = mlp.act_fn

    def swiglu(x: Tensor) -> Tensor:
        gate, up = both(x).chunk(2, -1)
        return down(act(gate) * up)

    return swiglu
