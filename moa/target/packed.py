"""A fast Llama-like decoder: the tokens of all rows are packed in every linear layer, attention
runs row by row.

The library's own model is the reference, and is used for other families; the weights are the same
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention

from moa.config import TargetFacts
from moa.target.contract import ExpectedLoad
from moa.target.decoder import Forward
from moa.target.head import Head
from moa.target.layout import Group, Layout
from moa.target.pages import PAGE, PagePool
from moa.target.products import MOST_ROWS, Product, joined, sizes_up_to, turns
from moa.target.rows import Row, RowBatch

PACKED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


class PackedDecoder:
    """Runs batches of any rows without padding. All shapes are known in advance, so nothing waits
    for the accelerator."""

    name = "packed"
    nbytes = 0
    unprepared = False

    def __init__(
        self,
        model: Any,
        facts: TargetFacts,
        cache: PagePool,
        *,
        kinds: Sequence[str],
        windows: Mapping[str, int | None],
        pack: bool,
        head: Head,
    ) -> None:
        """Share the weights of a model of `PACKED_FAMILIES`; `kinds` names each layer's entry of
        `windows`; `pack` as for `joined`."""
        backbone = model.get_decoder()
        self._embedding: Tensor = backbone.embed_tokens.weight
        self._norm: Tensor = backbone.norm.weight
        self._layers = [
            _Layer(layer, facts, kind, pack=pack)
            for layer, kind in zip(backbone.layers, kinds, strict=True)
        ]
        self._turns = turns(backbone, self._embedding, cache.capacity).unsqueeze(2)
        self._facts = facts
        self._cache = cache
        self._windows = windows
        self._head = head
        self._taps: tuple[int, ...] = ()
        """Layers whose inputs are kept."""
        self.logits = head.logits
        self.samples = self._embedding.device.type != "cpu"

    def check(self, batch: RowBatch) -> None:
        """It computes any batch."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers from now on."""
        self._taps = tuple(layers)

    def run(self, batch: RowBatch) -> Forward:
        """Keys and values go to the pages of the batch's slots."""
        layout, ids = self._lay_out(batch)
        cos, sin = self._turns.index_select(0, layout.positions).unbind(1)
        x = embedding(ids, self._embedding)
        inputs = {}
        for number, (layer, (keys, values)) in enumerate(
            zip(self._layers, self._cache.layers, strict=True)
        ):
            if number in self._taps:
                inputs[number] = x
            x = layer(x, cos, sin, layout, keys, values)
        return Forward(
            hidden=rms_norm(x, x.shape[-1:], self._norm, self._facts.rms_norm_eps),
            tapped=torch.cat([inputs[number] for number in self._taps], -1) if inputs else None,
            path=self.name,
        )

    @torch.inference_mode()
    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Have oneDNN make its kernels for every number of tokens up to the most of a forward now,
        small ones first: else the first requests wait for them, and memory grows for hours,
        whenever a number comes up for the first time. Kernels of one layer serve all. A large
        target on a slow machine does as much of it as there are `seconds` of processor time for: on
        a busy machine, too, the kernels are there when the port opens."""
        if self._embedding.device.type != "cpu":
            return
        # The head's copy in float32: the first request would wait for it, or find no memory.
        _ = self._head.wide
        until = time.process_time() + seconds
        room = min(self._cache.capacity, PAGE * self._cache.pages)
        most = min(load.tokens, MOST_ROWS, room)
        hidden = self._embedding.new_zeros(most, self._embedding.shape[1])
        slot = self._cache.acquire()
        try:
            for tokens in sizes_up_to(most):
                if time.process_time() > until:
                    break
                self.run_first_layer(Row.chain(slot, [0] * tokens, judged="none"))
                self.logits(hidden[:tokens])
        finally:
            self._cache.release(slot)

    def run_first_layer(self, row: Row) -> None:
        """The first layer alone, over one row."""
        batch = RowBatch.of([row], self._facts.vocab_size)
        self._cache.begin(batch.slots, batch.sizes)
        layout, ids = self._lay_out(batch)
        cos, sin = self._turns.index_select(0, layout.positions).unbind(1)
        keys, values = self._cache.layers[0]
        self._layers[0](embedding(ids, self._embedding), cos, sin, layout, keys, values)

    def prepare_more(self) -> None:
        """All is made at the start."""

    def _lay_out(self, batch: RowBatch) -> tuple[Layout, Tensor]:
        layout = Layout(
            batch,
            self._cache,
            windows=self._windows,
            repeats=self._facts.heads // self._facts.kv_heads,
            together=False,
        )
        return layout, torch.from_numpy(batch.ids).to(self._embedding.device)


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
