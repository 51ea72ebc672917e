"""The shape of a sibling: that of its model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moa.config import TargetFacts


@dataclass(frozen=True, kw_only=True)
class SiblingConfig:
    """What of a model matters when it drafts."""

    family: str
    hidden_size: int
    vocab_size: int
    layers: int
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

    @classmethod
    def of(cls, model: TargetFacts) -> Self:
        """Of a model's facts."""
        return cls(
            family=model.family,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            rope_theta=model.rope_theta,
        )

    def write(self, folder: Path) -> None:
        """Nothing is written: the model's own `config.json` says it."""
        raise NotImplementedError("a sibling is a model that has its own config.json")
