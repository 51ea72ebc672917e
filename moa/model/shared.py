"""The frozen parts that a drafter takes from its target: the embedding, the head, and their scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from moa.model.families import embedding_scale


@dataclass(frozen=True)
class SharedWeights:
    """The target's embedding and head; tied targets give the same tensor twice."""

    embedding: Tensor
    head: Tensor
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    bias: Tensor | None = None
    """Added to the logits of a part of a head."""

    def embed(self, ids: Tensor) -> Tensor:
        """The target's token embeddings, scaled as the target scales them."""
        x = F.embedding(ids, self.embedding)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head."""
        logits = F.linear(hidden.to(self.head.dtype), self.head)
        if (cap := self.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @classmethod
    def of(cls, model: PreTrainedModel) -> SharedWeights:
        """Those of a loaded model, without a copy."""
        scale, softcap = scaling_of(model.config)
        return cls(
            embedding=_weight(model.get_input_embeddings()),
            head=_weight(model.get_output_embeddings()),
            embedding_scale=scale,
            logit_softcap=softcap,
        )


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def scaling_of(config: Any) -> tuple[float, float | None]:
    """Embedding scale and logit soft cap by a model's config: only the Gemma family has either."""
    return embedding_scale(config), getattr(config, "final_logit_softcapping", None)
