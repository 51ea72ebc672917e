"""The graph of a drafter of states: its one layer, whose cache holds features too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.graph import GraphSizes, count_weights
from moa.drafters.states.config import StateDrafterConfig

_BESIDE_TARGET = ("fuse.", "tap_norms.")
"""Weights that stay on the server."""


class StateGraph(nn.Module):
    """`StateDrafter.states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one step of the drafter as the exported graph does: final states of the `queries`,
        the layer's new keys and values, and the two halves of the new features.

        `rest` holds the rows of the cache in which the tokens' features lie, then the past keys,
        values and halves of features.
        """
        feature_rows, *past = rest
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        x, rows = self.drafter.states(
            x, positions, mask, pairs, feature_rows=feature_rows, queries=queries
        )
        return x, *(tensor for layer in rows for tensor in layer)


def sizes(folder: Path, config: StateDrafterConfig, facts: TargetFacts) -> GraphSizes:
    """The sizes of a drafter's graph, from its `config` and the headers of the files in its
    folder. A record replaces a row of every layer of its cache, so it is as wide as all of them."""
    return GraphSizes(
        kind="states",
        hidden_size=config.hidden_size,
        vocabulary=facts.vocab_size,
        tied=facts.tie_embeddings,
        cache=config.cache,
        record_width=sum(2 * heads * width for heads, width in config.cache),
        layer_weights=count_weights(folder, lambda name: not name.startswith(_BESIDE_TARGET)),
        no_static_form="this one reads states",
    )
