"""The library's own model over the paged KV cache: the reference for all families, and the only way
for Gemma."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import eager_mask

from moa.config import TargetFacts
from moa.target.contract import ExpectedLoad
from moa.target.decoder import Forward
from moa.target.families import MaskPlan
from moa.target.head import Head
from moa.target.layout import Layout
from moa.target.pages import PagePool
from moa.target.rows import RowBatch

# transformers 5 refuses any name with "sdpa" in it for models, such as Gemma 2, whose soft cap its
# own sdpa drops.
ATTENTION = "moa_tree"


def tree_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [B,H,T,D] over `key`, `value` [B,Hkv,V,D] under an additive mask [B,1,T
    or G*T,V].

    For grouped-query attention with a mask, the library repeats keys and values. Here the query
    heads of a group are rows of one product with their shared key head, and the mask is repeated,
    once per forward: batched verification is about three times as fast on a CPU. The mask already
    includes the sliding window. A soft cap bends the scores before the mask, which the fused kernel
    cannot do, so capped models take the explicit product.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, kv_heads, groups * length, width)
    if attention_mask is not None and attention_mask.shape[-2] != groups * length:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = torch.matmul(query, key.transpose(2, 3)) * (
            width**-0.5 if scaling is None else scaling
        )
        scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = scores + attention_mask
        out = torch.matmul(
            torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value
        )
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


# With the library's eager mask registered too, a model with this attention still runs plain
# forwards correctly.
AttentionInterface.register(ATTENTION, tree_sdpa)
AttentionMaskInterface.register(ATTENTION, eager_mask)


def cache_argument(module: nn.Module) -> str:
    """The name by which a model or a layer of the library takes its cache: `past_key_values`, and
    `cache` in later releases of transformers 5."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class Taps:
    """Captures the inputs of chosen decoder layers, counted from 0, at every forward of the
    library's model."""

    def __init__(self, backbone: nn.Module, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._inputs: dict[int, Tensor] = {}
        for index in set(layers):
            layer: nn.Module = backbone.layers[index]  # type: ignore[index, assignment]
            layer.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def _hook(self, index: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[index] = (args[0] if args else kwargs["hidden_states"]).detach()

        return keep

    def take(self) -> Tensor:
        """The states of the latest forward, side by side: `[B, T, taps * hidden]`."""
        return torch.cat([self._inputs[index] for index in self.layers], dim=-1)


class LibraryDecoder:
    """Runs a batch as the library does, padded to its longest row."""

    name = "library"
    nbytes = 0
    unprepared = False

    def __init__(
        self, model: Any, facts: TargetFacts, cache: PagePool, *, plan: MaskPlan, head: Head
    ) -> None:
        self._backbone = model.get_decoder()
        self._facts = facts
        self._cache = cache
        self._cache_argument = cache_argument(self._backbone)
        self._plan = plan
        self._head = head
        self._taps: Taps | None = None
        self.logits = head.logits
        self.samples = head.weight.device.type != "cpu"

    def check(self, batch: RowBatch) -> None:
        """It computes any batch."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers from now on."""
        self._taps = Taps(self._backbone, layers)

    def run(self, batch: RowBatch) -> Forward:
        """Keys and values go to the pages of the batch's slots."""
        layout = Layout(
            batch,
            self._cache,
            windows=self._plan.windows,
            repeats=self._facts.heads // self._facts.kv_heads,
            together=True,
        )
        ids = torch.from_numpy(batch.ids).to(self._head.weight.device)
        (group,) = layout.groups
        shape = group.rows, group.width
        out = self._backbone(
            input_ids=_padded(ids, group.picks).view(shape),
            attention_mask=group.masks if self._plan.per_layer_type else group.masks["all"],
            position_ids=_padded(layout.positions, group.picks).view(shape),
            use_cache=True,
            **{self._cache_argument: _PageView(layout, self._cache.layers)},
        )
        return Forward(
            hidden=_packed(out.last_hidden_state, group.real),
            tapped=None if self._taps is None else _packed(self._taps.take(), group.real),
            path=self.name,
        )

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Make the head's copy: the first request would wait for it, or find no memory."""
        _ = self._head.wide

    def prepare_more(self) -> None:
        """All is made at the start."""


class _PageView(Cache):
    """The cache of one forward, with the interface that `transformers` layers need."""

    def __init__(self, layout: Layout, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(layers=[])
        self._layout = layout
        self._memory = memory

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values `[B,Hkv,T,D]`; returns all keys and values that the
        rows may attend to."""
        keys, values = self._memory[layer_idx]
        return self._store(keys, key_states), self._store(values, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: rows differ in length, and every forward passes its own positions and masks."""
        return 0

    def _store(self, memory: Tensor, new: Tensor) -> Tensor:
        (group,) = self._layout.groups
        tokens = new.transpose(1, 2).flatten(0, 1)
        tokens = tokens if group.real is None else tokens.index_select(0, group.real)
        memory.index_copy_(0, self._layout.columns, tokens)
        return group.read(memory)


def _packed(padded: Tensor, real: Tensor | None) -> Tensor:
    flat = padded.flatten(0, 1)
    return flat if real is None else flat.index_select(0, real)


def _padded(packed: Tensor, picks: Tensor | None) -> Tensor:
    return packed if picks is None else torch.index_select(packed, 0, picks)
