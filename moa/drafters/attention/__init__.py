"""The paper's Mixture of Attentions: a small language model whose cross-attention reads activation
records, made of the target's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.attention.config import MODEL_TYPE, AttentionConfig
from moa.drafters.contract import DrafterKind, Trainee
from moa.drafters.graph import GraphSizes

if TYPE_CHECKING:
    from moa.drafters.attention.model import AttentionDrafter
    from moa.target.loading import LoadedModel
    from moa.training.config import TrainingConfig
    from moa.training.losses import TeacherLike


class AttentionKind(DrafterKind):
    """Ours, and the paper's published checkpoint."""

    name = "attention"
    reads_caches = True

    def owns(self, config: Mapping[str, Any]) -> bool:
        """By the published `model_type`."""
        return config.get("model_type") == MODEL_TYPE

    def config(self, folder: Path, facts: TargetFacts) -> AttentionConfig:
        """Its `config.json`, ours or the published."""
        return AttentionConfig.read(folder, facts)

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> AttentionDrafter:
        """Load a trained drafter from its folder. It uses the embedding and head of the `target` in
        memory, and the target's last layers where its config says that it borrows some."""
        from moa.drafters.attention.model import load_attention

        assert target is not None
        return load_attention(folder, target, facts, dtype)

    def trainee(self, config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
        """The drafter to be trained, a new one or that of `config.init`, and its objective."""
        from moa.drafters.attention.training import trainee

        return trainee(config, target, teacher)

    def sizes(self, folder: Path, facts: TargetFacts, target: Path) -> GraphSizes:
        """The sizes of the graph that a device would run: the body's layers, cross-attention, and
        the target's last layers that it borrows."""
        from moa.drafters.attention.graph import sizes

        return sizes(folder, self.config(folder, facts), facts, target)
