"""The shape of a sibling: that of its model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from moa.config import TargetFacts

if TYPE_CHECKING:
    from moa.target.families import LayerMemory


@dataclass(frozen=True, kw_only=True)
class SiblingConfig:
    """What of a model matters when it drafts."""

    family: str
    hidden_size: int
    vocab_size: int
    layers: int
    """All of them."""
    cached: tuple[tuple[int, tuple[int, int]], ...]
    """Layers that keep keys and values of their own, their KV heads and the heads' width."""
    running: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    """Layers that keep running states instead, and the states' shapes. A layer that is in neither
    list reads the keys and values of an earlier one."""
    per_layer: int = 0
    """Numbers that a token brings to the layers beside its embedding."""
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
    def first_reader(self) -> int:
        """The first of the last layers, all of which keep nothing; the number of layers if the last
        one keeps something."""
        keeping = [layer for layer, _ in (*self.cached, *self.running)]
        return max(keeping) + 1

    @property
    def alike(self) -> bool:
        """Whether every layer keeps keys and values of its own, all of one shape."""
        return len(self.cached) == self.layers and len({shape for _, shape in self.cached}) == 1

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all running states, layer by layer."""
        return tuple(shape for _, shapes in self.running for shape in shapes)

    @classmethod
    def of(cls, model: TargetFacts, memory: LayerMemory, per_layer: int = 0) -> Self:
        """The shape of a sibling, a language model that drafts as it is: from the facts of the
        model, what its layers keep of a text (`memory`), and how many numbers each token brings to
        them beside its embedding."""
        return cls(
            family=model.family,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            layers=model.layers,
            cached=tuple(sorted(memory.cached.items())),
            running=tuple(sorted(memory.running.items())),
            per_layer=per_layer,
            rope_theta=model.rope_theta,
        )

    def write(self, folder: Path) -> None:
        """Nothing is written: the model's own `config.json` says it."""
        raise NotImplementedError("a sibling is a model that has its own config.json")
