"""Target layer inference (TLI): the target's last N layers, frozen, run by the drafter on its own states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor]
"""Keys and values, `[B, kv_heads, T, D]` each."""


class _Past:
    """The least cache that a `transformers` attention layer asks for: joins past rows and remembers the new ones."""

    def __init__(self, past: Rows) -> None:
        self.past = past
        self.new: Rows = past

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Rows:
        self.new = (key, value)
        return torch.cat([self.past[0].to(key), key], dim=-2), torch.cat([self.past[1].to(value), value], dim=-2)


class BorrowedLayers(nn.Module):
    """The last `count` decoder layers of a target, its rotary embedding and its final norm.

    The past of each layer holds the target's own rows of verified tokens and the drafter's rows of drafted ones.
    Sliding windows are not applied: a drafter may look further than its target does, and drafts are short.
    """

    def __init__(self, backbone: nn.Module, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(list(backbone.layers)[-count:])  # type: ignore[arg-type]
        self.norm = cast(nn.Module, backbone.norm)
        self._rotary = _rotary_of(backbone)
        kinds = getattr(backbone.config, "layer_types", None) or [None] * len(backbone.layers)  # type: ignore[arg-type]
        self._kinds: list[str | None] = list(kinds[-count:])
        self.requires_grad_(False)

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]) -> tuple[Tensor, list[Rows]]:
        """States after the target's final norm, and each layer's new rows."""
        rows = []
        for layer, kind, rows_before in zip(self.layers, self._kinds, past, strict=True):
            cache = _Past(rows_before)
            embeddings = self._rotary(x, positions, kind)
            x = layer(x, attention_mask=mask, position_ids=positions, past_key_values=cache, **embeddings)
            x = x[0] if isinstance(x, tuple) else x
            rows.append(cache.new)
        return self.norm(x), rows


def _rotary_of(backbone: nn.Module) -> Callable[[Tensor, Tensor, str | None], dict[str, Any]]:
    """How this family's layers get their rotary positions: Gemma 3 has two kinds, and two ways to say so."""
    rotary: Any = backbone.rotary_emb
    local: Any = getattr(backbone, "rotary_emb_local", None)
    if local is not None:  # transformers 4
        return lambda x, at, _: {"position_embeddings_global": rotary(x, at), "position_embeddings_local": local(x, at)}
    if "layer_type" in inspect.signature(rotary.forward).parameters:  # transformers 5
        return lambda x, at, kind: {"position_embeddings": rotary(x, at, kind)}
    return lambda x, at, _: {"position_embeddings": rotary(x, at)}
