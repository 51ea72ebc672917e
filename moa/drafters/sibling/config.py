"""The shape of a sibling: that of its model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from moa.config import TargetFacts


@dataclass(frozen=True, kw_only=True)
class SiblingConfig:
    """What of a model matters when it drafts."""

    family: str
    hidden_size: int
    vocab_size: int
    layers: int
    """All of them."""
    running: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    """Layers that keep running states instead of keys and values, and the states' shapes."""
    kv_heads: int
    head_dim: int
    rope_theta: float

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads no states."""
        return ()

    @property
    def borrowed_layers(self) -> int:
        """It borrows no layers."""
        return 0

    @property
    def cached_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers - len(self.running)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all running states, layer by layer."""
        return tuple(shape for _, shapes in self.running for shape in shapes)

    @classmethod
    def of(
        cls,
        model: TargetFacts,
        running: Mapping[int, tuple[tuple[int, ...], ...]] = MappingProxyType({}),
    ) -> Self:
        """Of a model's facts, and its layers that keep running states."""
        return cls(
            family=model.family,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            rope_theta=model.rope_theta,
            running=tuple(sorted(running.items())),
        )

    def write(self, folder: Path) -> None:
        """Nothing is written: the model's own `config.json` says it."""
        raise NotImplementedError("a sibling is a model that has its own config.json")
