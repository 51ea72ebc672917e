"""What a drafter takes from its target, frozen: the embedding, the head, and how the target scales them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class SharedWeights:
    """The target's embedding and head; tied targets give the same tensor twice."""

    embedding: Tensor
    head: Tensor
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> SharedWeights:
        """Those of a loaded model, without a copy."""
        scale, softcap = scaling_of(model.config)
        return cls(
            embedding=model.get_input_embeddings().weight.detach(),
            head=model.get_output_embeddings().weight.detach(),
            embedding_scale=scale,
            logit_softcap=softcap,
        )


def scaling_of(config: Any) -> tuple[float, float | None]:
    """Embedding scale and logit soft cap by a model's config: only the Gemma family has either."""
    gemma = str(config.model_type).startswith("gemma")
    scale = math.sqrt(config.hidden_size) if gemma else 1.0
    return scale, getattr(config, "final_logit_softcapping", None)
