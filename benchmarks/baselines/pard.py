"""PARD's way (An et al., 2025): an independent small language model that drafts a whole block in one pass.

The block is the last token and mask tokens after it; a mask's state predicts the token after its position, from the
tokens before the block and the masks before itself. As in the public recipe all masks share one learned embedding,
and training drops most of the far ones (conditional drop: each place keeps a share of those of the place before it),
so that a row costs three times a plain one and not `BLOCK` times. The loss is the one of all drafters here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moa.config import DrafterConfig
from moa.model.drafter import Drafter
from moa.model.drafting import DraftRequest, Level, MoaDrafting
from moa.model.shared import SharedWeights
from moa.training.block import MaskBlocks
from moa.training.data import Batch
from moa.training.distill import Distillation
from moa.training.loop import Loss
from moa.training.masks import additive, token_mask
from moa.tree import DraftTree

MODEL_TYPE = "pard"
BLOCK = 6
"""Tokens drafted in one pass."""
KEPT = 0.7
"""Share of the masks at one place of the block that also have the next place trained."""
MASK = -1
"""Stands for the mask token in token ids."""


class Pard(Drafter):
    """A body without records, and the embedding of the mask token."""

    def __init__(self, config: DrafterConfig, shared: SharedWeights) -> None:
        super().__init__(config, shared)
        self.mask_token = nn.Parameter(torch.zeros(config.hidden_size))

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, the mask's its own."""
        x = super().embed(ids.clamp(min=0))
        return torch.where((ids == MASK).unsqueeze(-1), self.mask_token.to(x.dtype), x)


class PardDrafting(MoaDrafting):
    """Runs the block once, at the first level of a tree; deeper levels read what it said of their position."""

    def __init__(self, drafter: Pard, *, slots: int = 1, capacity: int = 2048, scratch: int = 256) -> None:
        super().__init__(drafter, slots=slots, capacity=capacity, scratch=scratch)
        self._said: dict[int, Tensor] = {}
        """By slot: logits after each position of the block."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """No deeper than the block: nothing beyond it was trained."""
        shapes = [replace(request.shape, depth=min(request.shape.depth, BLOCK)) for request in requests]
        return super().draft([replace(r, shape=shape) for r, shape in zip(requests, shapes, strict=True)])

    def logits(self, level: Level) -> Tensor:
        """Those of the level's position, whatever was chosen on the way there."""
        at = {grower.level for grower in level.growers}
        assert len(at) == 1
        if at == {0}:
            depth = max(request.shape.depth for request in level.requests)
            self._said |= dict(zip(level.slots, self._block(level, depth), strict=True))
        found = torch.stack([self._said[slot][min(at)] for slot in level.slots])
        return found.unsqueeze(1).expand(-1, level.ids.shape[1], -1)

    def _block(self, level: Level, depth: int) -> Tensor:
        masks = level.ids.new_full((len(level.slots), depth - 1), MASK)
        ids = torch.cat([level.ids, masks], 1)
        positions = level.positions + torch.arange(depth, device=level.device)
        inside = additive(torch.ones(depth, depth, dtype=torch.bool).tril()).to(level.device)
        before = level.mask[..., : level.view].expand(-1, -1, depth, -1)
        mask = torch.cat([before, inside.expand(len(ids), 1, -1, -1)], -1)
        hidden, _ = self.drafter.features(ids, positions, mask, level.past(self.pool))
        return self.drafter.logits(hidden)


class PardTraining(Distillation):
    """Every position predicts its next token, from tokens alone or as a place of a block."""

    module: Pard

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The sum over tokens and masks; what is shown is the tokens', which other drafters have too."""
        lesson = self.teacher(batch)
        device = lesson.hidden.device
        masks = MaskBlocks.draw(batch, self.seed, step, block=BLOCK, share=KEPT, kept=KEPT)
        ids = np.concatenate([batch.ids, np.full_like(masks.anchors, MASK)], axis=1)
        inputs = torch.from_numpy(ids).to(device)
        positions = torch.cat([torch.from_numpy(batch.positions), masks.positions(batch)], 1).to(device)
        mask = additive(masks.seen(token_mask(batch, None))).unsqueeze(1).to(device)
        hidden, _ = self.module.features(inputs, positions, mask, self.module.empty_rows(inputs))
        own = batch.ids.shape[1]
        every = np.broadcast_to(np.arange(own), batch.ids.shape)
        tokens = MaskBlocks(every, np.zeros(own, np.int64))
        total, plain = torch.zeros((), device=device), None
        for states, part in ((hidden[:, :own], tokens), (hidden[:, own:], masks)):
            row, column = np.nonzero(part.counted(batch))
            theirs = lesson.hidden[torch.from_numpy(row), torch.from_numpy(part.at[row, column])]
            mine = states[torch.from_numpy(row), torch.from_numpy(column)]
            found = self._compare(mine, theirs).summed()
            total, plain = total + found.total, plain or found
        assert plain is not None
        return Loss(total, plain.weight, plain.shown)
