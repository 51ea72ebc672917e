"""EAGLE-2's drafter (Li et al., EMNLP 2024): one decoder layer that predicts the target's next final state.

As in its public code: `fc` joins a token's embedding with the feature before it, the layer has no input norm, the
target's head reads its output as it is, and training adds noise to the true features, because the features are its own
predictions when it drafts. The dynamic tree is the engine's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.baselines.config import BaselineConfig
from benchmarks.baselines.features import FeatureBaseline, shifted
from moa.model.blocks import additive
from moa.model.borrowed import Rows, SharedWeights
from moa.model.features import run_layer, self_rows
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.masks import token_mask
from moa.training.teacher import Lesson, Teacher

PUBLIC_LOSS = DistillSettings(loss_weight=0.1, feature_weight=1.0)
"""The public recipe: smooth-L1 on the feature + 0.1 * soft cross-entropy, whose gradient is that of KL."""
NOISE = 0.1
"""Uniform noise of up to this size is added to features."""


class Eagle(FeatureBaseline):
    """fc(embedding of token p, feature of p - 1) -> one layer -> feature of p."""

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = self.block()
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(self.layer, self._join(ids, features), *self.rotary(positions))

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        x = self._join(ids, features)
        return run_layer(self.layer, x, x, *self.rotary(positions), mask, past)

    def _join(self, ids: Tensor, features: Tensor) -> Tensor:
        embedded = self.embed(ids)
        joined: Tensor = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        return joined


class EagleTraining(Distillation):
    """EAGLE's training, one step from true features with noise, with this project's losses and loop."""

    def __init__(self, model: Eagle, teacher: Teacher, settings: DistillSettings = PUBLIC_LOSS, seed: int = 0) -> None:
        super().__init__(model, teacher, settings, seed)  # type: ignore[arg-type]
        self.model = model

    def _draft(self, batch: Batch, lesson: Lesson, latest: NDArray[np.int64], step: int, progress: float) -> Tensor:
        device = lesson.hidden.device
        ids, positions = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device)
        luck = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_000_003 + int(batch.rows[0]))
        noise = (torch.rand(lesson.hidden.shape, generator=luck) * 2 - 1) * NOISE
        features = shifted(lesson.hidden + noise.to(lesson.hidden), positions)
        mask = additive(token_mask(batch, None, device=device)).unsqueeze(1)
        hidden, _ = self.model.step(ids, features, positions, mask, self.model.empty_rows(ids))
        return hidden
