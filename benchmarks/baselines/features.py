"""The baselines that read features. Token 0 has no feature before it and reads zeros (EAGLE's public code drops that
row)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.baselines.layers import BaselineModel
from moa.model.borrowed import Rows


class FeatureBaseline(BaselineModel):
    """A `FeatureModel` with the target's embedding and head."""

    reads_first = True
    words: Tensor | None = None

    @property
    def feature_size(self) -> int:
        """The target's width."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.config.vocab_size

    def read(self, features: Tensor) -> Tensor:
        """Preprocess the target's states; a drafted feature is used as it is."""
        return features

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        raise NotImplementedError

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        raise NotImplementedError


def shifted(features: Tensor, positions: Tensor) -> Tensor:
    """`[B, L, H]` by one place: the feature before each token, zeros at the first of a document."""
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    return before * (positions > 0).unsqueeze(-1).to(features.dtype)
