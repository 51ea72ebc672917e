"""EAGLE-2's drafter (Li et al., EMNLP 2024): one decoder layer that predicts the target's next
final state.

As in its public code: `fc` joins a token's embedding with the feature before it, the layer has no
input norm, the target's head reads its output as it is, and training adds noise to the true
features, because the features are its own predictions when it drafts. The dynamic tree is the
engine's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moa.drafters.attention.training import Distillation, DistillSettings
from moa.drafters.features import FeatureModel, run_layer, self_rows
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.training import shifted
from moa.model.blocks import Block, additive, rotary
from moa.model.borrowed import Rows, SharedWeights
from moa.training.data import Batch
from moa.training.losses import TeacherLike
from moa.training.masks import token_mask
from moa.training.teacher import TeacherOutput

PUBLIC_LOSS = DistillSettings(loss_weight=0.1, feature_weight=1.0)
"""The public recipe: smooth-L1 on the feature + 0.1 * soft cross-entropy, whose gradient is that of
KL."""
NOISE = 0.1
"""Uniform noise of up to this size is added to features."""


class EagleConfig(StateDrafterConfig):
    """The same dimensions for another layer, which reads no state but the final one."""

    MODEL_TYPE: ClassVar = "eagle2"
    taps: tuple[int, ...] = ()


class Eagle(FeatureModel):
    """fc(embedding of token p, feature of p - 1) -> one layer -> feature of p."""

    def __init__(self, config: EagleConfig, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        width = config.hidden_size
        heads = config.num_attention_heads
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = Block(
            width, heads, config.num_key_value_heads, config.intermediate_size, config.rms_norm_eps
        )
        self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.shared = shared

    def read(self, features: Tensor) -> Tensor:
        """The target's final state, as it is."""
        return features

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(self.layer, self._join(ids, features), *self._turns(positions))

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        x = self._join(ids, features)
        return run_layer(self.layer, x, x, *self._turns(positions), mask, past)

    def _join(self, ids: Tensor, features: Tensor) -> Tensor:
        embedded = self.shared.embed(ids).to(self.weight.dtype)
        joined: Tensor = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        return joined

    def _turns(self, positions: Tensor) -> Rows:
        return rotary(positions, self.layer.self_attn.head_dim, self.config.rope_theta)


class EagleTraining(Distillation):
    """EAGLE's training, one step from true features with noise, with this project's losses and
    loop."""

    def __init__(
        self,
        model: Eagle,
        teacher: TeacherLike,
        settings: DistillSettings = PUBLIC_LOSS,
        seed: int = 0,
    ) -> None:
        super().__init__(model, teacher, settings, seed)  # type: ignore[arg-type]

    def _draft(
        self,
        batch: Batch,
        lesson: TeacherOutput,
        latest: NDArray[np.int64],
        step: int,
        progress: float,
    ) -> Tensor:
        device = lesson.hidden.device
        ids = torch.from_numpy(batch.ids).to(device)
        positions = torch.from_numpy(batch.positions).to(device)
        luck = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + step) * 1_000_003 + int(batch.rows[0])
        )
        noise = (torch.rand(lesson.hidden.shape, generator=luck) * 2 - 1) * NOISE
        features = shifted(lesson.hidden + noise.to(lesson.hidden), positions)
        mask = additive(token_mask(batch, None, device=device)).unsqueeze(1)
        model: Any = self.module
        hidden, _ = model.step(ids, features, positions, mask, model.empty_rows(ids))
        return hidden
