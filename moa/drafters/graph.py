"""What an exported step graph looks like, whichever drafter it is made of, and how large it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moa.manifest import KVHeads
from moa.target.identity import text_shapes

Sizes = tuple[int | str, ...]
"""Sizes, and names of those that a step may choose."""


@dataclass(frozen=True)
class GraphSpec:
    """Inputs and outputs of a drafter's layers, which lie between embedding and head."""

    hidden_size: int
    cache: tuple[KVHeads, ...]
    """Layers with a cache; the borrowed ones last."""
    records: KVHeads | None
    """Heads of the records that cross-attention reads, where there is any."""
    borrowed: int = 0
    """Of how many of these layers, the last ones, records carry the rows."""
    features: bool = False
    """Whether each token reads a feature from the last layer of the cache."""
    states: tuple[tuple[int, ...], ...] = ()
    """Shapes of the running states that other layers keep: of a step's tokens, a chain, the states
    after the last one come out."""
    per_layer: int = 0
    """Numbers that each token brings to the layers beside its embedding."""

    @property
    def embedded(self) -> tuple[str, ...]:
        """The inputs that are looked up by token ids: they lie inside of the whole graph."""
        return ("x", "per_layer") if self.per_layer else ("x",)

    @property
    def inputs(self) -> dict[str, Sizes]:
        """The shape of each of the graph's inputs by its name, in order. Letters are sizes that may
        differ from step to step: T tokens, N queries (tokens whose final states are wanted), P rows
        of the cache, and R activation records, which cross-attention reads."""
        shapes: dict[str, Sizes] = {
            "x": (1, "T", self.hidden_size),
            "positions": (1, "T"),
            "queries": ("N",),
            "mask": (1, 1, "T", "P+T"),
        }
        if self.per_layer:
            shapes["per_layer"] = (1, "T", self.per_layer)
        if self.records is not None:
            record_shape = (1, self.records.kv_heads, "R", self.records.head_dim)
            shapes["record_k"] = record_shape
            shapes["record_v"] = record_shape
            shapes["record_mask"] = (1, 1, 1, "R")
        if self.features:
            shapes["feature_rows"] = ("T",)
        return shapes | self._cached("past", "P") | self._running("past")

    @property
    def rows(self) -> dict[str, Sizes]:
        """The shape of each of the graph's outputs besides the final states: new cache rows, in the
        order of the past ones, and running states."""
        return self._cached("new", "T") | self._running("new")

    def _running(self, when: str) -> dict[str, Sizes]:
        """Names and shapes of the running states, those before a step (`past`) or after it (`new`)."""
        return {f"{when}_state_{i}": (1, *shape) for i, shape in enumerate(self.states)}

    def _cached(self, when: str, rows: str) -> dict[str, Sizes]:
        """Names and shapes of the layers' keys and values: of the tokens before a step (`past`), or
        of its own tokens (`new`). `rows` is the letter that stands for how many tokens these
        are."""
        shapes: dict[str, Sizes] = {}
        for layer, heads in enumerate(self.cache):
            shape = (1, heads.kv_heads, rows, heads.head_dim)
            shapes[f"{when}_k_{layer}"] = shape
            shapes[f"{when}_v_{layer}"] = shape
        return shapes


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """What the headers of files say about the graph of a drafter, before anything is loaded."""

    kind: str
    """As the bundle's manifest names it."""
    hidden_size: int
    vocabulary: int
    """Tokens that drafter and target both know."""
    tied: bool
    """Whether embedding and head are one matrix."""
    cache: tuple[tuple[int, int], ...]
    """Heads and their width, for each layer with a cache."""
    record_width: int
    layer_weights: int
    of_published: bool = False
    """Whether weights are those of a model that was published, and not of a training of ours: its files
    have other precisions, so that other memory is taken while they are read."""
    per_layer_width: int = 0
    """Numbers that a token brings to the layers beside its embedding."""
    running_states: bool = False
    """Whether layers keep running states, which only the programs of this project carry on."""
    no_static_form: str = ""
    """Why there is no form with fixed sizes for other runtimes; empty if there is."""


def count_weights(folder: Path, wanted: Callable[[str], bool]) -> int:
    """The number of weights in a folder's tensors whose names are wanted, from the files' headers."""
    shapes = text_shapes(folder)
    return sum(math.prod(shape) for name, shape in shapes.items() if wanted(name))


def layer_number(name: str) -> int:
    """The number of the decoder layer that a tensor belongs to; -1 for none."""
    _, separator, after = name.partition(".layers.")
    if not separator:
        return -1
    return int(after.partition(".")[0])
