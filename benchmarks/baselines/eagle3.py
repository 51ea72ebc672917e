"""EAGLE-3.1's drafter: low, middle and high target states, each normed and fused; trained on its own outputs.

EAGLE-3 (Li et al., NeurIPS 2025): `fuse` joins the inputs of three target layers, the one decoder layer reads the
normed embedding and the normed feature side by side on the feature's residual, and what it feeds on after the first
drafted token is its own output. Training does the same for several steps ("training-time test"), step s weighing
0.8 ** s, with no loss on features. 3.1 norms each target state before it is fused, feeds back its output behind the
last norm, and takes seven steps. Here the head is the target's, frozen, where the public code trains one over a
reduced vocabulary: at equal trainable size its own head would leave no parameters for the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.baselines.config import BaselineConfig
from benchmarks.baselines.features import FeatureBaseline, shifted
from moa.model.blocks import RMSNorm, additive
from moa.model.borrowed import Rows
from moa.model.features import run_layer, self_rows
from moa.model.shared import SharedWeights
from moa.model.target import Committed, Step, Target
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.loop import Loss
from moa.training.masks import same_document
from moa.training.teacher import Teacher

STEPS = 7
"""Steps of the training-time test: the true features, then six times on its own."""
STEP_DECAY = 0.8


class TappedTarget(Target):
    """A target whose commits carry the states of the tapped layers in place of the final one."""

    @torch.inference_mode()
    def commit(self, step: Step, b: int, path: Sequence[int]) -> Committed:
        """As the target's own."""
        return replace(super().commit(step, b, path), hidden=step.tapped(b, path))


class Eagle3(FeatureBaseline):
    """norm(embedding of token p) and norm(feature of p - 1) -> one layer of double input width -> feature of p."""

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.tap_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.taps)
        self.fuse = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layer = self.block()
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, width, bias=False))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def read(self, features: Tensor) -> Tensor:
        """Norm and fuse the tapped states."""
        parts = features.chunk(len(self.tap_norms), dim=-1)
        normed = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
        fused: Tensor = self.fuse(torch.cat(normed, dim=-1))
        return fused

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(self.layer, self._join(ids, features), *self.rotary(positions))

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The feature at each token, input of the next one, and the cache rows."""
        x, rows = run_layer(self.layer, features, self._join(ids, features), *self.rotary(positions), mask, past)
        return self.norm(x), rows

    def _join(self, ids: Tensor, features: Tensor) -> Tensor:
        embedded = self.layer.input_layernorm(self.embed(ids))
        return torch.cat([embedded, self.hidden_norm(features).to(embedded.dtype)], dim=-1)


class Eagle3Training(Distillation):
    """The training-time test: each step takes the previous one's outputs, and the true rows are one step older."""

    def __init__(
        self, model: Eagle3, teacher: Teacher, settings: DistillSettings, seed: int = 0, *, steps: int = STEPS
    ) -> None:
        super().__init__(model, teacher, settings, seed)  # type: ignore[arg-type]
        self.model = model
        self.steps = steps
        teacher.tap(model.config.taps)

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The weighted sum of all steps' losses; what is shown is the first step's, which other drafters have too."""
        lesson = self.teacher(batch)
        device = lesson.hidden.device
        ids, positions = torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device)
        segments = torch.from_numpy(batch.segments).to(device)
        wanted = torch.from_numpy(batch.wanted).to(device)[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        assert lesson.tapped is not None
        features = shifted(self.model.read(lesson.tapped), positions)
        past, total, first = self.model.empty_rows(ids), torch.zeros((), device=device), None
        for ahead in range(self.steps):
            mask = additive(ahead_mask(segments, ahead)).unsqueeze(1)
            hidden, new = self.model.step(ids, features, positions, mask, past)
            # A position fewer tokens into its document than steps ahead has no true row to start from.
            counted = wanted & (positions[:, :-1] >= ahead)
            mine, theirs = hidden[:, :-1][counted], lesson.hidden[:, :-1][counted]
            found = self._compare(mine, theirs).summed()
            total = total + STEP_DECAY**ahead * found.total
            first = first or found
            past = (torch.cat([past[0], new[0]], dim=-2), torch.cat([past[1], new[1]], dim=-2))
            features = shifted(hidden, positions)
        assert first is not None
        return Loss(total, first.weight, first.shown)


def ahead_mask(segments: Tensor, ahead: int) -> Tensor:
    """`[B, L, L * (ahead + 1)]`: what a query sees when the newest `ahead` rows before it and its own are drafted.

    The first L columns are the rows of true features, seen up to `ahead` tokens back; of each later step's rows it
    sees the one on its own path.
    """
    index = torch.arange(segments.shape[1], device=segments.device)
    distance = index.view(-1, 1) - index.view(1, -1)
    blocks = [distance >= ahead, *(distance == ahead - step for step in range(1, ahead + 1))]
    same = same_document(segments)
    mask = torch.cat([block & same for block in blocks], dim=-1)
    # A query at its document's start would attend to nothing; its loss is not counted.
    mask[:, :, -segments.shape[1] :] |= distance == 0
    return mask
