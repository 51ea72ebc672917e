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
        """By the prefix alone."""
        return False

    def config(self, folder: Path, facts: TargetFacts) -> SiblingConfig:
        """Of the model's own facts."""
        own, shape = read_shape(folder)
        return SiblingConfig.of(own, layer_memory(shape), per_layer_width(shape))

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> SiblingDrafter:
        """The model, if it has the target's tokenizer."""
        from moa.drafters.sibling.model import SiblingDrafter

        if target is None:
            return SiblingDrafter.load(folder, facts, dtype or torch.float32, torch.device("cpu"))
        return SiblingDrafter.load(folder, facts, dtype or target.dtype, target.device)

    def sizes(self, folder: Path, facts: TargetFacts, target: Path) -> GraphSizes:
        """All its layers."""
        from moa.drafters.sibling.graph import sizes

        return sizes(folder, facts)

    def weights_id(self, folder: Path, facts: TargetFacts) -> str:
        """Those of the model by itself."""
        return read_facts(folder)[0].weights_id
