"""The graph of a sibling: all layers of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.graph import GraphSizes, count_weights, layer_number
from moa.target.families import refuse_as_sibling, running_states
from moa.target.loading import read_facts, read_shape


class SiblingGraph(nn.Module):
    """`SiblingDrafter.states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """`past`: keys and values by layer, then running states."""
        cached = 2 * self.drafter.config.cached_layers
        pairs = list(zip(past[0:cached:2], past[1:cached:2], strict=True))
        x, rows, running = self.drafter.states(
            x, positions, mask, pairs, queries=queries, running=past[cached:]
        )
        return x, *(tensor for layer in rows for tensor in layer), *running


def sizes(folder: Path, facts: TargetFacts) -> GraphSizes:
    """From the headers of the model's files."""
    own, unpacked = read_facts(folder, identify=False)
    shape = read_shape(folder)[1]
    refuse_as_sibling(shape)
    running = running_states(shape)
    return GraphSizes(
        kind="independent",
        hidden_size=own.hidden_size,
        vocabulary=min(facts.vocab_size, own.vocab_size),
        tied=own.tie_embeddings,
        cache=((own.kv_heads, own.head_dim),) * (own.layers - len(running)),
        record_width=0,
        layer_weights=count_weights(unpacked, lambda name: layer_number(name) >= 0),
        running_states=bool(running),
        no_static_form="this one is independent",
    )
