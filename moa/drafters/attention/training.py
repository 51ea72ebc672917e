"""Distillation: train a drafter to predict its target's tokens from activations that are up to T
tokens old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moa.drafters.attention.model import AttentionDrafter
from moa.errors import ConfigError
from moa.model.blocks import additive
from moa.model.borrowed import Rows, SharedWeights
from moa.training.data import Batch
from moa.training.loop import Loss
from moa.training.losses import Compared, compare, wanted_places
from moa.training.masks import AnchorRule, borrowed_mask, record_mask, token_mask
from moa.training.teacher import Lesson, Teacher


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Losses and masks of the training. The defaults were the best in this project's ablations
    (docs/log)."""

    loss_weight: float = 1.0
    """Weight of KL(target || draft)."""
    feature_weight: float = 0.0
    """Weight of smooth-L1 between the drafter's and the target's final states (the paper: 1, beside
    0.1 of KL)."""
    anchors: AnchorRule = field(default_factory=AnchorRule)
    staircase: bool = False
    """SA sees only tokens after the latest anchor, with a probability that falls from 1 to 0 over
    the first half of the run."""

    def __post_init__(self) -> None:
        if (
            self.loss_weight < 0
            or self.feature_weight < 0
            or self.loss_weight + self.feature_weight == 0
        ):
            raise ConfigError("the weights of the losses must not be negative, and not all zero")


PAPER = DistillSettings(
    loss_weight=0.1, feature_weight=1.0, staircase=True, anchors=AnchorRule(strict=False)
)
"""The public training code's choices."""
TOKENS_AT_ONCE = 2048
"""Tokens per LSA chunk with gradient checkpointing."""
TOKENS_STEP = 256
"""Numbers of tokens that LSA is run for are multiples of this, or all."""


def in_steps(read: Tensor) -> Tensor:
    """`read` with more positions, up to a multiple of `TOKENS_STEP`: a CPU's bf16 kernels keep
    memory for every shape that they have seen, and without this each step brings a new one. No
    query sees the additional records."""
    flat = read.flatten()
    more = (~flat).nonzero().flatten()[: -int(flat.sum()) % TOKENS_STEP]
    return flat.index_fill(0, more, True).view_as(read)


class Distillation:
    """The `Objective` of the training loop: a drafter beside its frozen teacher."""

    def __init__(
        self,
        drafter: AttentionDrafter,
        teacher: Teacher,
        settings: DistillSettings,
        seed: int = 0,
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        """`gradient_checkpointing` recomputes LSA and the blocks for their gradients: less memory,
        more time."""
        self.module = drafter.train()
        self.gradient_checkpointing = gradient_checkpointing
        self.teacher = teacher
        self.settings = settings
        self.seed = seed
        self.part_of_head: Callable[[Batch, int], SharedWeights] | None = None
        """For each step a part of the target's head, where drafter and target are compared over a
        part only."""

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The drafter's loss at every position whose next token is wanted."""
        latest = self.settings.anchors.latest(batch, self.seed, step)
        lesson = self.teacher(batch)
        hidden = self._draft(batch, lesson, latest, step, progress)
        wanted = wanted_places(batch).to(hidden.device)
        return self._compare(
            hidden[wanted], lesson.hidden[wanted], self._heads(batch, step)
        ).summed()

    def _draft(
        self, batch: Batch, lesson: Lesson, latest: NDArray[np.int64], step: int, progress: float
    ) -> Tensor:
        drafter = self.module
        settings = self.settings
        device = lesson.hidden.device
        positions = torch.from_numpy(batch.positions).to(device)
        seen = record_mask(batch, latest, strict=settings.anchors.strict, device=device)
        luck = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        stairs = settings.staircase and float(torch.rand((), generator=luck)) < 1 - 2 * progress
        tokens = additive(token_mask(batch, latest if stairs else None, device=device)).unsqueeze(1)
        records: tuple[Tensor, ...] = ()
        if drafter.config.use_ca and seen.any():
            rows = self._records(lesson, positions, in_steps(seen.any(1)))
            records = *rows, additive(seen).unsqueeze(1)
        ids = torch.from_numpy(batch.ids).to(device)
        past = drafter.empty_rows(ids)
        borrowed = None
        if count := drafter.config.tli:
            past += [
                (k.transpose(1, 2), v.transpose(1, 2))
                for k, v in zip(lesson.keys[-count:], lesson.values[-count:], strict=True)
            ]
            borrowed = additive(borrowed_mask(batch, seen)).unsqueeze(1)
        inputs: tuple[Any, ...] = (ids, positions, tokens, past, *records)
        if self.gradient_checkpointing:
            hidden, _ = checkpoint(
                drafter.features, *inputs, borrowed_mask=borrowed, use_reentrant=False
            )
        else:
            hidden, _ = drafter.features(*inputs, borrowed_mask=borrowed)
        return hidden

    def _records(self, lesson: Lesson, positions: Tensor, read: Tensor) -> Rows:
        """The activation records that queries read; LSA is not run for the others, which are zero."""
        inputs = lesson.keys[:, read], lesson.values[:, read], lesson.hidden[read], positions[read]
        if self.gradient_checkpointing:
            # In chunks, to bound the memory of recomputing: LSA holds every token once per layer.
            pieces = zip(
                *(x.split(TOKENS_AT_ONCE, dim=int(x.ndim == 4)) for x in inputs), strict=True
            )
            parts = [
                checkpoint(self.module.project, *piece, use_reentrant=False) for piece in pieces
            ]
            rows = tuple(torch.cat(kind) for kind in zip(*parts, strict=True))
        else:
            rows = self.module.project(*inputs)
        key, value = (
            row.new_zeros(*read.shape, *row.shape[1:]).index_put((read,), row).transpose(1, 2)
            for row in rows
        )
        return key, value

    def _heads(self, batch: Batch, step: int) -> tuple[SharedWeights, SharedWeights]:
        if self.part_of_head is None:
            return self.module.shared, self.teacher.shared
        part = self.part_of_head(batch, step)
        return part, part

    def _compare(
        self, mine: Tensor, theirs: Tensor, heads: tuple[SharedWeights, SharedWeights]
    ) -> Compared:
        settings = self.settings
        found = compare(mine, theirs, *heads)
        each = settings.loss_weight * found.loss
        if settings.feature_weight:
            features = F.smooth_l1_loss(mine.float(), theirs.float(), reduction="none").mean(-1)
            each = each + settings.feature_weight * features
        return found._replace(loss=each)
