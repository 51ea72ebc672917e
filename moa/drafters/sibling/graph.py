"""The graph of a sibling: all layers of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.graph import GraphSizes, count_weights, layer_number
from moa.target.families import layer_memory, per_layer_width, refuse_as_sibling
from moa.target.loading import read_facts, read_shape


class SiblingGraph(nn.Module):
    """`SiblingDrafter.states`, with the arguments in the order of the graph's inputs."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, x: Tensor, positions: Tensor, queries: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one step of the model as the exported graph does.

        `rest` holds, in this order: the rows that tokens bring to the layers beside their
        embedding, where the model has such; the past keys and values, which alternate, of each
        layer that keeps them; the running states of the other layers. Returns the final states of
        the `queries`, and the new keys, values and running states in the same order.
        """
        per_layer = None
        if self.drafter.config.per_layer:
            per_layer, *rest = rest  # type: ignore[assignment]
        cached = 2 * len(self.drafter.config.cached)
        pairs = list(zip(rest[0:cached:2], rest[1:cached:2], strict=True))
        x, rows, running = self.drafter.states(
            x,
            positions,
            mask,
            pairs,
            per_layer=per_layer,
            queries=queries,
            running=rest[cached:],
        )
        new_rows: list[Tensor] = []
        for keys, values in rows:
            new_rows += [keys, values]
        return x, *new_rows, *running


def sizes(folder: Path, facts: TargetFacts) -> GraphSizes:
    """The sizes of the graph of a sibling, a language model that drafts as it is, beside a target
    with these facts. They are read from the headers of its files. A `UsageError` for a model that
    cannot be exported as a sibling."""
    own, unpacked = read_facts(folder, identify=False)
    shape = read_shape(folder)[1]
    refuse_as_sibling(shape)
    memory = layer_memory(shape)
    width = per_layer_width(shape)
    return GraphSizes(
        kind="independent",
        hidden_size=own.hidden_size,
        vocabulary=min(facts.vocab_size, own.vocab_size),
        tied=own.tie_embeddings,
        cache=tuple(memory.cached.values()),
        record_width=0,
        layer_weights=count_weights(unpacked, lambda name: layer_number(name) >= 0)
        + own.hidden_size * width,  # the product that goes to all layers
        of_published=True,
        per_layer_width=width,
        running_states=bool(memory.running),
        no_static_form="this one is independent",
    )
