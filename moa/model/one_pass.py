"""Drafting in one pass beside the target: the block of every sequence in one batch, then a walk without the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moa.block import Said, draft_block
from moa.masking import additive
from moa.model.drafter import Drafter
from moa.model.drafting import DraftRequest, Level, MoaDrafting
from moa.sampling import gumbel
from moa.tree import DraftTree, TreeGrower

CANDIDATES = 16
"""Tokens of each position that a walk chooses from; a bundle's graph says as many."""


class OnePassDrafting(MoaDrafting):
    """`MoaDrafting` whose drafts cost one forward however deep they are."""

    def __init__(self, drafter: Drafter, *, slots: int = 1, capacity: int = 2048, scratch: int = 256) -> None:
        super().__init__(drafter, slots=slots, capacity=capacity, scratch=scratch)
        self._pairs = drafter.block_head.pairs(drafter.shared, self.vocab_size)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each request, no deeper than the block."""
        if not requests:
            return []
        depth = min(self.drafter.config.block, max(request.shape.depth for request in requests))
        growers = [TreeGrower(request.pending, request.shape) for request in requests]
        level = Level(list(requests), growers, self.pool, self.device)
        trees = []
        for request, said in zip(requests, self._say(level, depth), strict=True):
            sampling = request.sampling
            scale = 1.0 if sampling.greedy else 1.0 / sampling.temperature
            trees.append(draft_block(request.pending, request.shape, said, self._pairs, scale))
        return trees

    def _say(self, level: Level, depth: int) -> list[Said]:
        """What the drafter says of the positions after every sequence's pending token."""
        masks = -torch.arange(1, depth, device=self.device).expand(len(level.slots), -1)
        ids = torch.cat([level.ids, masks], 1)
        positions = level.positions + torch.arange(depth, device=self.device)
        inside = torch.from_numpy(additive(np.tri(depth, dtype=np.bool_))).to(self.device)
        before = level.mask[..., : level.view].expand(-1, -1, depth, -1)
        mask = torch.cat([before, inside.expand(len(ids), 1, -1, -1)], -1)
        hidden, _ = self.features(level, ids, positions, mask)
        logits = self.drafter.logits(hidden)[..., : self.vocab_size].float()
        top = self._noisy(level, logits).log_softmax(-1).topk(min(CANDIDATES, self.vocab_size))
        gates = self.drafter.block_head.gates(hidden).float().cpu().numpy()
        tokens, logp = top.indices.cpu().numpy(), top.values.cpu().numpy()
        return [Said(*one) for one in zip(tokens, logp, gates, strict=True)]

    def _noisy(self, level: Level, logits: Tensor) -> Tensor:
        """The logits as the sampler of each position will see them (`scores` of the steps does the same)."""
        for row, request in enumerate(level.requests):
            sampling, first = request.sampling, level.positions_of(row) + 1
            if not sampling.greedy:
                places = range(first, first + logits.shape[1])
                noise = np.stack([gumbel(sampling.seed, place, self.vocab_size) for place in places])
                logits[row] = logits[row] / sampling.temperature + torch.from_numpy(noise).to(logits)
        return logits
