"""EAGLE-3 drafters that others have published, for the server's own drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from moa.config import TargetFacts
from moa.drafters.contract import DrafterKind

if TYPE_CHECKING:
    from moa.drafters.eagle3.config import Eagle3Config
    from moa.drafters.eagle3.model import Eagle3Drafter


class Eagle3Kind(DrafterKind):
    """In the layouts of its authors, of SpecForge and of `speculators`."""

    name = "eagle3"
    on_device = False

    def owns(self, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is that of an EAGLE-3 drafter, by the names that its publishers
        use."""
        names = [str(config.get("speculators_model_type"))]
        architectures = config.get("architectures")
        if isinstance(architectures, list):
            names += [str(architecture) for architecture in architectures]
        # The authors' configs are those of a plain Llama with a vocabulary for drafts.
        return any("eagle3" in name.lower() for name in names) or "draft_vocab_size" in config

    def config(self, folder: Path, facts: TargetFacts) -> Eagle3Config:
        """Its `config.json`, whichever layout it has."""
        from moa.drafters.eagle3.config import Eagle3Config

        return Eagle3Config.read(folder, facts)

    def load(
        self,
        folder: Path,
        target: PreTrainedModel | None,
        facts: TargetFacts,
        dtype: torch.dtype | None = None,
    ) -> Eagle3Drafter:
        """Load a published checkpoint. The target's embedding and head stand in for those that it
        does not have."""
        from moa.drafters.eagle3.model import Eagle3Drafter
        from moa.model.borrowed import SharedWeights

        assert target is not None
        return Eagle3Drafter.load(folder, facts, SharedWeights.of(target), dtype)
