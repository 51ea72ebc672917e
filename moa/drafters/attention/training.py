"""Distillation: train a drafter to predict its target's tokens from activations that are up to T
tokens old."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import (
    AttentionDrafter,
    attention_around,
    load_attention,
    new_attention,
)
from moa.drafters.contract import Trainee, digest
from moa.errors import UsageError
from moa.model.blocks import additive
from moa.model.borrowed import Rows
from moa.target.loading import LoadedModel, load_model
from moa.training.config import TrainingConfig
from moa.training.data import Batch
from moa.training.loop import Loss
from moa.training.losses import LossSettings, TeacherLike, TeacherObjective, wanted_places
from moa.training.masks import AnchorRule, borrowed_mask, parse_spacings, record_mask, token_mask
from moa.training.teacher import TeacherOutput


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LossSettings):
    """Losses and masks of the training. The defaults were the best in this project's ablations
    (docs/log)."""

    anchors: AnchorRule = field(default_factory=AnchorRule)
    staircase: bool = False
    """SA sees only tokens after the latest anchor, with a probability that falls from 1 to 0 over
    the first half of the run."""


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


class Distillation(TeacherObjective):
    """The `Objective` of the training loop: a drafter beside its frozen teacher."""

    def __init__(
        self,
        drafter: AttentionDrafter,
        teacher: TeacherLike,
        settings: DistillSettings,
        seed: int = 0,
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        """`gradient_checkpointing` recomputes LSA and the blocks for their gradients: less memory,
        more time."""
        super().__init__(drafter, teacher, settings, seed)
        self.gradient_checkpointing = gradient_checkpointing

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The drafter's loss at every position whose next token is wanted."""
        latest = self.settings.anchors.latest(batch, self.seed, step)
        known = self.teacher(batch)
        hidden = self._draft(batch, known, latest, step, progress)
        wanted = wanted_places(batch).to(hidden.device)
        return self._compare(
            hidden[wanted], known.hidden[wanted], self._heads(batch, step)
        ).summed()

    def _draft(
        self,
        batch: Batch,
        known: TeacherOutput,
        latest: NDArray[np.int64],
        step: int,
        progress: float,
    ) -> Tensor:
        drafter = self.module
        settings = self.settings
        device = known.hidden.device
        positions = torch.from_numpy(batch.positions).to(device)
        seen = record_mask(batch, latest, strict=settings.anchors.strict, device=device)
        luck = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        stairs = settings.staircase and float(torch.rand((), generator=luck)) < 1 - 2 * progress
        tokens = additive(token_mask(batch, latest if stairs else None, device=device)).unsqueeze(1)
        records: tuple[Tensor, ...] = ()
        if drafter.config.use_ca and seen.any():
            rows = self._records(known, positions, in_steps(seen.any(1)))
            records = *rows, additive(seen).unsqueeze(1)
        ids = torch.from_numpy(batch.ids).to(device)
        past = drafter.empty_rows(ids)
        borrowed = None
        if count := drafter.config.tli:
            past += [
                (k.transpose(1, 2), v.transpose(1, 2))
                for k, v in zip(known.keys[-count:], known.values[-count:], strict=True)
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

    def _records(self, known: TeacherOutput, positions: Tensor, read: Tensor) -> Rows:
        """The activation records that queries read; LSA is not run for the others, which are zero."""
        inputs = known.keys[:, read], known.values[:, read], known.hidden[read], positions[read]
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


def trainee(config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
    """By the flags of `moa-train --attention`, or the paper's choices."""
    settings = settings_of(config)
    drafter, start = _drafter(config, target)
    objective = Distillation(
        drafter,
        teacher,
        settings,
        config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    return Trainee(drafter, objective, start)


def settings_of(config: TrainingConfig) -> DistillSettings:
    """Losses and masks."""
    settings = PAPER if config.paper else DistillSettings()
    if config.spacing is None:
        return settings
    rule = parse_spacings(config.spacing)
    rule = dataclasses.replace(rule, strict=settings.anchors.strict)
    return dataclasses.replace(settings, anchors=rule)


def _drafter(config: TrainingConfig, target: LoadedModel) -> tuple[AttentionDrafter, str]:
    facts = target.facts
    if config.init is not None:
        shape = AttentionConfig.read(config.init, facts)
        if config.shape:
            given = min(config.shape).replace("_", " ")
            raise UsageError(f"--init brings its own shape, {given} cannot be changed")
        if config.tli is not None:  # borrowed layers are not part of its weights
            shape = dataclasses.replace(shape, tli=config.tli)
        drafter = load_attention(config.init, target.model, facts, torch.float32, shape)
        return drafter, digest(drafter)
    dimensions = {"tli": config.tli or 0, **config.shape}
    if config.body is None:
        shape = AttentionConfig.for_target(facts, **dimensions)
        return new_attention(shape, target.model), ""
    body = load_model(config.body, device=target.model.device)
    drafter = attention_around(target.model, facts, body, dimensions, frozen=config.freeze_body)
    return drafter, digest(drafter)
