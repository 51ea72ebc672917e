"""The default, and what we recommend: one layer that reads the target's newest states, and its own
outputs where these are late or never come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.contract import DrafterKind, Trainee
from moa.drafters.graph import GraphSizes
from moa.drafters.states.config import StateDrafterConfig

if TYPE_CHECKING:
    from moa.drafters.states.model import StateDrafter
    from moa.target.loading import LoadedModel
    from moa.training.config import TrainingConfig
    from moa.training.losses import TeacherLike


class StatesKind(DrafterKind):
    """What `moa-train` makes."""

    name = "states"

    def owns(self, config: Mapping[str, Any]) -> bool:
        """By its `model_type`."""
        return config.get("model_type") == StateDrafterConfig.MODEL_TYPE

    def config(self, folder: Path, facts: TargetFacts) -> StateDrafterConfig:
        """Its `config.json`."""
        return StateDrafterConfig.read(folder, facts)

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> StateDrafter:
        """Load a trained drafter from its folder. It uses the embedding and head of the `target` in
        memory."""
        from moa.drafters.states.model import StateDrafter
        from moa.model.borrowed import SharedWeights

        assert target is not None
        return StateDrafter.load(folder, facts, SharedWeights.of(target), dtype)

    def trainee(self, config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
        """The drafter to be trained, a new one or that of `config.init`, and its objective."""
        from moa.drafters.states.training import trainee

        return trainee(config, target, teacher)

    def sizes(self, folder: Path, facts: TargetFacts, target: Path) -> GraphSizes:
        """The sizes of the graph that a device would run: one layer, and the maps of tokens and of
        its own outputs."""
        from moa.drafters.states.graph import sizes

        return sizes(folder, self.config(folder, facts), facts)
