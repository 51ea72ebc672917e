"""States between a target's layers, for drafters that read more of it than keys, values and the final state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


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
