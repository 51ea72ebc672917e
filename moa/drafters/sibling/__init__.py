"""A small language model of the target's tokenizer, as it is: nothing is trained, nothing is read
of the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.contract import DrafterKind
from moa.drafters.graph import GraphSizes
from moa.drafters.sibling.config import SiblingConfig
from moa.target.families import layer_memory, per_layer_width
from moa.target.loading import read_facts, read_shape

if TYPE_CHECKING:
    from moa.drafters.sibling.model import SiblingDrafter

PREFIX = "independent:"
"""Before the folder or hub id of a model that drafts as it is."""


class SiblingKind(DrafterKind):
    """A model that is named with `independent:`, because its config is any model's."""

    name = "sibling"
    shares_weights = False

    def owns(self, config: Mapping[str, Any]) -> bool:
        """Always false: its config.json is any model's, so only the prefix tells a sibling."""
        return False

    def config(self, folder: Path, facts: TargetFacts) -> SiblingConfig:
        """The shape of the sibling, from the facts of its own model."""
        own, shape = read_shape(folder)
        return SiblingConfig.of(own, layer_memory(shape), per_layer_width(shape))

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> SiblingDrafter:
        """Load the model as a drafter, in the target's precision and on its device where there is a
        target in memory; a `UsageError` unless it has the target's tokenizer."""
        from moa.drafters.sibling.model import SiblingDrafter

        if target is None:
            return SiblingDrafter.load(folder, facts, dtype or torch.float32, torch.device("cpu"))
        return SiblingDrafter.load(folder, facts, dtype or target.dtype, target.device)

    def sizes(self, folder: Path, facts: TargetFacts, target: Path) -> GraphSizes:
        """The sizes of the graph that a device would run: it holds all layers of the model."""
        from moa.drafters.sibling.graph import sizes

        return sizes(folder, facts)

    def weights_id(self, folder: Path, facts: TargetFacts) -> str:
        """The identity of the model's weights; the target has no part in it."""
        return read_facts(folder)[0].weights_id
