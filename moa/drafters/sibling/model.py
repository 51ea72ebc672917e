"""A small language model as a drafter, with its own embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.body_drafting import BodyModel
from moa.drafters.graph import GraphSpec
from moa.drafters.sibling.config import SiblingConfig
from moa.drafters.sibling.graph import SiblingGraph
from moa.errors import UsageError
from moa.manifest import KVHeads
from moa.model.borrowed import Rows, SharedWeights, Sibling
from moa.target.loading import load_model


class SiblingDrafter(BodyModel):
    """Token ids -> embedding -> layers -> norm -> head, all of the model."""

    name = "sibling"
    config: SiblingConfig

    def __init__(self, config: SiblingConfig, body: Sibling, target_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.body = body
        self.vocab_size = min(target_vocab_size, config.vocab_size)
        """Tokens that both know: their tables may be padded differently."""

    @classmethod
    def load(
        cls, folder: Path, facts: TargetFacts, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """The model in `folder` beside the target with these facts, whose tokenizer it must have."""
        loaded = load_model(folder, device=device, dtype=dtype)
        refuse_another_tokenizer(folder, loaded.facts, facts)
        config = SiblingConfig.of(loaded.facts)
        return cls(config, Sibling(loaded.model), facts.vocab_size).eval()

    @property
    def shared(self) -> SharedWeights:  # type: ignore[override]
        """The model's own embedding and head."""
        return self.body.shared

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *records: Tensor,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """States that the head reads, and new rows of the cache; it reads no records."""
        x = self.shared.embed(ids).to(self.weight.dtype)
        return self.states(x, positions, mask, past, queries=queries)

    def states(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """`features` after embedded tokens; states of the `queries` alone, if given."""
        rows: list[Rows] = []
        for index, before in enumerate(past):
            x, new = self.body.decoder.layer(index, x, positions, mask, before)
            rows.append(new)
        if queries is not None:
            x = x.index_select(1, queries)
        return self.body.decoder.norm(x), rows

    def extend(
        self, ids: Tensor, positions: Tensor, mask: Tensor, past: Sequence[Rows]
    ) -> list[Rows]:
        """Rows of tokens that need no logits."""
        last = torch.tensor([ids.shape[1] - 1], device=ids.device)
        return self.features(ids, positions, mask, past, queries=last)[1]

    @property
    def graph_spec(self) -> GraphSpec:
        """A cache for each layer, and nothing else."""
        config = self.config
        heads = KVHeads(kv_heads=config.kv_heads, head_dim=config.head_dim)
        return GraphSpec(config.hidden_size, (heads,) * config.layers, records=None)

    @property
    def bundle_kind(self) -> Any:
        """It is independent of its target."""
        return "independent"

    def graph_module(self) -> nn.Module:
        """All layers, and the norm."""
        return SiblingGraph(self)


def refuse_another_tokenizer(folder: Path, own: TargetFacts, target: TargetFacts) -> None:
    """Raise if a model's tokenizer is not the target's."""
    if own.tokenizer_hash != target.tokenizer_hash:
        raise UsageError(
            f"the model in {folder} has another tokenizer than the target",
            hint="a drafter's body must share the target's tokenizer",
        )
