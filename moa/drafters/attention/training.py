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
_STEPS_OF_SEED = 1_000_003
"""Distance of the seeds of two runs, so that their steps draw different numbers."""


def in_steps(read: Tensor) -> Tensor:
    """Flag more positions in `read`, the tokens whose records some query reads, until their number
    is a multiple of `TOKENS_STEP` or all are flagged. A CPU's bf16 kernels keep memory for every
    shape that they have seen, and without this each step brings a new one. No query sees the
    additional records."""
    flat = read.flatten()
    missing = -int(flat.sum()) % TOKENS_STEP
    unread = (~flat).nonzero().flatten()
    return flat.index_fill(0, unread[:missing], True).view_as(read)


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
        """Train `drafter` against a frozen `teacher`, the target. With `gradient_checkpointing`
        what a layer has computed is not kept for its gradient but computed again: less memory, more
        time."""
        super().__init__(drafter, teacher, settings, seed)
        self.gradient_checkpointing = gradient_checkpointing

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The drafter's loss at every position whose next token is wanted. `progress` goes from 0
        to 1 over the run."""
        # Anchors simulate a slow link: a token may read the target's records up to its latest
        # anchor.
        latest = self.settings.anchors.latest(batch, self.seed, step)
        known = self.teacher(batch)
        hidden = self._draft(batch, known, latest, step, progress)
        wanted = wanted_places(batch).to(hidden.device)
        compared = self._compare(hidden[wanted], known.hidden[wanted], self._heads(batch, step))
        return compared.summed()

    def _draft(
        self,
        batch: Batch,
        known: TeacherOutput,
        latest: NDArray[np.int64],
        step: int,
        progress: float,
    ) -> Tensor:
        """The drafter's guess of the target's final state at each token, `[B, L, hidden]`.

        Each token reads activation records, what cross-attention takes from the target, of tokens
        up to its anchor, whose index in the row is in `latest`: a draft knows no newer ones.
        `known` is what the target computed for the batch.
        """
        drafter = self.module
        device = known.hidden.device
        ids = torch.from_numpy(batch.ids).to(device)
        positions = torch.from_numpy(batch.positions).to(device)
        strict = self.settings.anchors.strict
        visible_records = record_mask(batch, latest, strict=strict, device=device)
        records = self._visible_records(known, positions, visible_records)
        past = drafter.empty_rows(ids)
        mask_of_borrowed = None
        if drafter.config.tli:
            past += self._borrowed_past(known)
            mask_of_borrowed = additive(borrowed_mask(batch, visible_records)).unsqueeze(1)
        hidden_up_to = latest if self._hides_tokens(step, progress) else None
        visible_tokens = token_mask(batch, hidden_up_to, device=device)
        mask = additive(visible_tokens).unsqueeze(1)
        inputs: tuple[Any, ...] = (ids, positions, mask, past, *records)
        if self.gradient_checkpointing:
            hidden, _ = checkpoint(
                drafter.features, *inputs, borrowed_mask=mask_of_borrowed, use_reentrant=False
            )
        else:
            hidden, _ = drafter.features(*inputs, borrowed_mask=mask_of_borrowed)
        return hidden

    def _hides_tokens(self, step: int, progress: float) -> bool:
        """Whether the staircase hides the tokens up to the anchor in this step, so that the drafter
        learns to read records. It is drawn with a probability that falls from 1 to 0 over the first
        half of the run."""
        return self.settings.staircase and self._draw(step) < 1 - 2 * progress

    def _visible_records(
        self, known: TeacherOutput, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, ...]:
        """The records that cross-attention reads: keys, values, and the additive mask of which
        token sees which record, made of the flags `visible` `[B, L, L]`. Nothing if no token sees
        any, or if the drafter reads none."""
        if not self.module.config.use_ca or not visible.any():
            return ()
        read_by_some_token = visible.any(1)
        keys, values = self._records(known, positions, in_steps(read_by_some_token))
        return keys, values, additive(visible).unsqueeze(1)

    def _borrowed_past(self, known: TeacherOutput) -> list[Rows]:
        """The past of the layers that the drafter borrows, which are the target's last ones: the
        target's own keys and values, `[B, heads, L, width]`."""
        past = []
        count = self.module.config.tli
        for keys, values in zip(known.keys[-count:], known.values[-count:], strict=True):
            past.append((keys.transpose(1, 2), values.transpose(1, 2)))
        return past

    def _draw(self, step: int) -> float:
        """A random number below 1 for a step, in every process the same."""
        generator = torch.Generator().manual_seed(self.seed * _STEPS_OF_SEED + step)
        return float(torch.rand((), generator=generator))

    def _records(self, known: TeacherOutput, positions: Tensor, read: Tensor) -> Rows:
        """The activation records of a batch, keys and values `[B, heads, L, width]`. They are made
        of what the target computed (`known`) for the positions that are flagged in `read` `[B, L]`,
        and are zero elsewhere, where no query looks."""
        # Of the n flagged tokens: keys and values `[layers, n, heads, width]`, final states, positions.
        tokens = (known.keys[:, read], known.values[:, read], known.hidden[read], positions[read])
        if self.gradient_checkpointing:
            record_keys, record_values = self._project_in_chunks(*tokens)
        else:
            record_keys, record_values = self.module.project(*tokens)
        return _at_places(record_keys, read), _at_places(record_values, read)

    def _project_in_chunks(
        self, keys: Tensor, values: Tensor, hidden: Tensor, positions: Tensor
    ) -> Rows:
        """The same as the drafter's `project`, some tokens at a time, to bound the memory of
        recomputing: LSA holds every token once per layer."""
        chunks = zip(
            keys.split(TOKENS_AT_ONCE, dim=1),  # the layers are the first dimension
            values.split(TOKENS_AT_ONCE, dim=1),
            hidden.split(TOKENS_AT_ONCE),
            positions.split(TOKENS_AT_ONCE),
            strict=True,
        )
        rows = [checkpoint(self.module.project, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([key for key, _ in rows]), torch.cat([value for _, value in rows])


def _at_places(rows: Tensor, places: Tensor) -> Tensor:
    """Rows `[n, heads, width]` at the `places` `[B, L]` that are flagged, zeros elsewhere: `[B,
    heads, L, width]`."""
    placed = rows.new_zeros(*places.shape, *rows.shape[1:]).index_put((places,), rows)
    return placed.transpose(1, 2)


def trainee(config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
    """The drafter to be trained, its objective, and what it starts from, by the flags of `moa-train
    --attention`."""
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
    """The losses and masks that the flags ask for: this project's, or with `--paper` those of the
    paper's code. `--spacing` replaces the distances between anchors, and nothing else."""
    settings = PAPER if config.paper else DistillSettings()
    if config.spacing is None:
        return settings
    rule = parse_spacings(config.spacing)
    rule = dataclasses.replace(rule, strict=settings.anchors.strict)
    return dataclasses.replace(settings, anchors=rule)


def _drafter(config: TrainingConfig, target: LoadedModel) -> tuple[AttentionDrafter, str]:
    """The drafter to be trained, and what it starts from, a digest of weights (empty for random
    ones). It is that of `--init`, a new one, or a new one around a language model (`--body`)."""
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
