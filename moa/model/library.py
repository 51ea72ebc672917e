"""The library's own model over the paged KV cache: the reference for all families, and the only way for
Gemma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from moa.model.families import MaskPlan
from moa.model.layout import Layout


class Taps:
    """Captures the inputs of chosen decoder layers, counted from 0, at every forward of the library's model."""

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

    def __init__(self, model: Any, plan: MaskPlan) -> None:
        self._backbone, self._plan = model.get_decoder(), plan
        self._taps: Taps | None = None
        self.tapped: Tensor | None = None
        """The inputs of the tapped layers in the latest forward, side by side: `[tokens, taps * hidden]`."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers from now on."""
        self._taps = Taps(self._backbone, layers)

    def __call__(self, ids: Tensor, layout: Layout, memory: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Final states `[tokens, hidden]`, after the last norm; keys and values go to the layout's columns."""
        (group,) = layout.groups
        shape = group.rows, group.width
        masks = group.masks if self._plan.per_layer_type else group.masks["all"]
        out = self._backbone(
            input_ids=_padded(ids, group.picks).view(shape),
            attention_mask=masks,
            position_ids=_padded(layout.positions, group.picks).view(shape),
            past_key_values=_PageView(layout, memory),
            use_cache=True,
        )
        self.tapped = _packed(self._taps.take(), group.real) if self._taps is not None else None
        return _packed(out.last_hidden_state, group.real)


class _PageView(Cache):
    """The cache of one forward, with the interface that `transformers` layers need."""

    def __init__(self, layout: Layout, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(layers=[])
        self._layout, self._memory = layout, memory

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values `[B,Hkv,T,D]`; returns all keys and values that the rows may attend
        to."""
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
