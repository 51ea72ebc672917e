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
from moa.target.products import MOST_ROWS, Product, joined, rotary_table, sizes_up_to
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
        """Use the weights of a model of one of `PACKED_FAMILIES`, without a copy. `kinds` says for
        each layer its kind, by which `windows` has its sliding window; with `pack` the weights are
        stored in oneDNN's layout, which is faster on a CPU."""
        backbone = model.get_decoder()
        self._embedding: Tensor = backbone.embed_tokens.weight
        self._norm: Tensor = backbone.norm.weight
        self._layers = [
            _Layer(layer, facts, kind, pack=pack)
            for layer, kind in zip(backbone.layers, kinds, strict=True)
        ]
        self._rotary_table = rotary_table(backbone, self._embedding, cache.capacity).unsqueeze(2)
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
        """Compute the final states of a batch's tokens, all rows one after another without padding;
        their keys and values go to the pages of the rows' slots."""
        layout, ids = self._lay_out(batch)
        cos, sin = self._rotary_table.index_select(0, layout.positions).unbind(1)
        x = self._embedded(ids)
        inputs = {}
        for number, layer in enumerate(self._layers):
            if number in self._taps:
                inputs[number] = x
            keys, values = self._cache.layers[number]
            x = layer(x, cos, sin, layout, keys, values)
        tapped = None
        if self._taps:
            tapped = torch.cat([inputs[number] for number in self._taps], -1)
        return Forward(
            hidden=rms_norm(x, x.shape[-1:], self._norm, self._facts.rms_norm_eps),
            tapped=tapped,
            path=self.name,
        )

    @torch.inference_mode()
    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Have oneDNN make its kernels for every number of tokens up to the most of a forward now,
        small ones first: else the first requests wait for them, and memory grows for hours,
        whenever a number comes up for the first time.

        It stops after `seconds` of processor time, which a large target on a slow machine may need
        more than. It is not the clock's time: on a busy machine, too, the kernels are there when
        the port opens.
        """
        if self._embedding.device.type != "cpu":
            return  # only a CPU computes by oneDNN
        # The head's copy in float32: the first request would wait for it, or find no memory.
        _ = self._head.wide
        # The numbers of tokens that come up: no more than a forward has, a product takes at once,
        # or a text and the whole cache hold.
        deadline = time.process_time() + seconds
        longest_row = min(self._cache.capacity, PAGE * self._cache.pages)
        most_tokens = min(load.tokens, MOST_ROWS, longest_row)
        hidden = torch.zeros(most_tokens, self._embedding.shape[1], dtype=self._norm.dtype)
        slot = self._cache.acquire()
        try:
            for tokens in sizes_up_to(most_tokens):
                if time.process_time() > deadline:
                    break
                self.run_first_layer(Row.chain(slot, [0] * tokens, judged="none"))
                self.logits(hidden[:tokens])
        finally:
            self._cache.release(slot)

    def run_first_layer(self, row: Row) -> None:
        """Run the first layer alone, over one row: its kernels serve all layers."""
        batch = RowBatch.of([row], self._facts.vocab_size)
        self._cache.begin(batch.slots, batch.sizes)
        layout, ids = self._lay_out(batch)
        cos, sin = self._rotary_table.index_select(0, layout.positions).unbind(1)
        keys, values = self._cache.layers[0]
        self._layers[0](self._embedded(ids), cos, sin, layout, keys, values)

    def embed_from(self, narrow: Tensor) -> None:
        """Read tokens' embeddings from here, where they are the same numbers in fewer bits."""
        self._embedding = narrow

    def _embedded(self, ids: Tensor) -> Tensor:
        """The embeddings of these tokens, in the precision of the layers."""
        return embedding(ids, self._embedding).to(self._norm.dtype)

    def prepare_more(self) -> None:
        """All is made at the start."""

    def _lay_out(self, batch: RowBatch) -> tuple[Layout, Tensor]:
        """Return the layout of a batch, which says how its rows are grouped for attention, which
        pages they read, and their positions and masks; and its token ids as a tensor on the
        device."""
        layout = Layout(
            batch,
            self._cache,
            windows=self._windows,
            repeats=self._facts.heads // self._facts.kv_heads,
            together=False,
        )
        return layout, torch.from_numpy(batch.ids).to(self._embedding.device)


class _Layer:
    """One decoder layer over packed tokens."""

    def __init__(self, layer: Any, facts: TargetFacts, kind: str, *, pack: bool) -> None:
        """Use the weights of one of the library's layers. `kind` is the kind of layer by which its
        mask is found, `pack` whether its weights are stored in oneDNN's layout."""
        attention = layer.self_attn
        self._heads = facts.heads
        self._kv_heads = facts.kv_heads
        self._width = facts.head_dim
        self._eps = facts.rms_norm_eps
        self._kind = kind
        self._scale = attention.scaling
        self._attention_norm = layer.input_layernorm.weight
        self._mlp_norm = layer.post_attention_layernorm.weight
        self._qkv = joined(attention, ("q_proj", "k_proj", "v_proj"), pack=pack)
        self._out = joined(attention, ("o_proj",), pack=pack)
        self._head_norms: tuple[Tensor, Tensor] | None = None
        """Weights of the norms of queries and keys, in families that have them."""
        query_norm = getattr(attention, "q_norm", None)
        key_norm = getattr(attention, "k_norm", None)
        if query_norm is not None and key_norm is not None:
            self._head_norms = (query_norm.weight, key_norm.weight)
        self._mlp = _feed_forward(layer, pack=pack)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Run the layer: from the states `x` `[tokens, hidden]` before it to those after it. `cos`
        and `sin` rotate each token by its position; its keys and values go to its columns of the
        cache, `keys` and `values` `[columns, kv_heads, head_dim]`."""
        heads = self._heads
        kv_heads = self._kv_heads
        normed = self._norm(x, self._attention_norm)
        # `[tokens, heads, head_dim]`: the heads of the queries, then of the keys, then of the values.
        qkv = self._qkv(normed).view(len(x), -1, self._width)
        queries_and_keys = qkv[:, : heads + kv_heads]
        if self._head_norms is not None:
            queries, new_keys = queries_and_keys.split([heads, kv_heads], dim=1)
            query_norm, key_norm = self._head_norms
            queries_and_keys = torch.cat(
                [self._norm(queries, query_norm), self._norm(new_keys, key_norm)], dim=1
            )
        # The rotation by positions: a head's halves swapped, times the sine. The first half's minus
        # is in the sine (`products.rotary_table`).
        swapped = queries_and_keys.roll(self._width // 2, -1)
        rotated = torch.addcmul(queries_and_keys * cos, swapped, sin)
        keys.index_copy_(0, layout.columns, rotated[:, heads:])
        values.index_copy_(0, layout.columns, qkv[:, heads + kv_heads :])
        x = x + self._out(self._attend(rotated[:, :heads], layout.groups, keys, values))
        return x + self._mlp(self._norm(x, self._mlp_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, self._eps)

    def _attend(
        self, query: Tensor, groups: Sequence[Group], keys: Tensor, values: Tensor
    ) -> Tensor:
        """The attention of `query` `[tokens, heads, head_dim]` over the cache, one product for each
        group of rows; returns `[tokens, heads * head_dim]` in the order of the batch."""
        if len(groups) == 1 and isinstance(groups[0].tokens, slice):
            return self._attend_group(query, groups[0], keys, values)  # the batch is one row
        result = query.new_empty(len(query), self._heads * self._width)
        for group in groups:
            of_group = self._attend_group(query, group, keys, values)
            if isinstance(group.tokens, slice):
                result[group.tokens] = of_group
            else:
                result.index_copy_(0, group.tokens, of_group)
        return result

    def _attend_group(self, query: Tensor, group: Group, keys: Tensor, values: Tensor) -> Tensor:
        """The attention of the tokens of one group of rows, as one product over rows that are
        padded to the same number of tokens. `query` is of the whole batch; returns `[tokens of the
        group, heads * head_dim]`, without the padding."""
        if group.padded_tokens is None:
            query = query[group.tokens]
        else:
            query = query.index_select(0, group.padded_tokens)
        # Query heads that share a key head become rows of one product with it: from `[rows, tokens,
        # key heads, sharing heads, head width]` to `[rows, key heads, sharing heads * tokens, head
        # width]`, and back.
        sharing = self._heads // self._kv_heads
        query = query.view(group.rows, group.width, self._kv_heads, sharing, self._width)
        query = query.permute(0, 2, 3, 1, 4).reshape(group.rows, self._kv_heads, -1, self._width)
        result = scaled_dot_product_attention(
            query,
            group.read(keys),
            group.read(values),
            group.masks[self._kind],
            scale=self._scale,
        )
        result = result.view(group.rows, self._kv_heads, sharing, group.width, self._width)
        result = result.permute(0, 3, 1, 2, 4).reshape(group.rows * group.width, -1)
        if group.real_places is None:
            return result
        return result.index_select(0, group.real_places)


def _feed_forward(layer: Any, *, pack: bool) -> Product:
    """Return the function that computes a layer's feed-forward part over `[tokens, hidden]`: a
    SwiGLU with its two first matrices in one product. What is no SwiGLU, a mixture of experts, is
    left to the library's own module."""
    mlp = getattr(layer, "mlp", None)
    is_swiglu = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    if mlp is None or not is_swiglu:
        experts = mlp if mlp is not None else layer.block_sparse_moe

        def mixture(x: Tensor) -> Tensor:
            result = experts(x.unsqueeze(0))
            if isinstance(result, tuple):  # with the router's logits
                result = result[0]
            return result.squeeze(0)

        return mixture
    both = joined(mlp, ("gate_proj", "up_proj"), pack=pack)
    down = joined(mlp, ("down_proj",), pack=pack)
    activation = mlp.act_fn

    def swiglu(x: Tensor) -> Tensor:
        gate, up = both(x).chunk(2, -1)
        return down(activation(gate) * up)

    return swiglu
