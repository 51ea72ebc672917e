"""Drafting on features: EAGLE's way. The input is token p with the target's state at p - 1, the newest one.

After the last verified token the inputs are the drafter's own predicted features. Row p of its cache belongs to
token p, so that positions, masks and sampling noise are those of every other drafter; token 0 has no feature before
it and reads zeros (the public code drops that row).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.baselines.layers import BaselineModel
from moa.model.borrowed import Rows
from moa.model.drafting import Level, LevelDrafting, append
from moa.model.target import Committed


class FeatureModel(BaselineModel):
    """A one-layer drafter that reads tokens and features."""

    def read(self, features: Tensor) -> Tensor:
        """Preprocess the target's states; a drafted feature is used as it is."""
        return features

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits; one layer, so they depend on nothing but their own input."""
        raise NotImplementedError

    def forward(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        raise NotImplementedError


def shifted(features: Tensor, positions: Tensor) -> Tensor:
    """`[B, L, H]` by one place: the feature before each token, zeros at the first of a document."""
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    return before * (positions > 0).unsqueeze(-1).to(features.dtype)


class FeatureDrafting(LevelDrafting):
    """Grows trees with a feature model: the input of a node is its parent's predicted feature."""

    def __init__(self, model: FeatureModel, *, slots: int = 1, capacity: int = 2048, scratch: int = 256) -> None:
        super().__init__(model.config.vocab_size, model.weight.device)
        self.model = model.eval()
        self.pool = model.pool(slots, capacity + scratch)
        self._newest: dict[int, Tensor] = {}
        """By slot: the feature of its last observed token."""
        self._drafted: dict[int, Tensor] = {}
        """By slot: the predicted features of the nodes fed so far, in the order of `TreeGrower.fed`."""

    def open(self) -> int:
        """Take an empty slot."""
        slot = self.pool.acquire()
        self._newest[slot] = self.model.weight.new_zeros(self.model.config.hidden_size)
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        super().close(slot)
        del self._newest[slot]
        self._drafted.pop(slot, None)

    @torch.inference_mode()
    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Replace drafted rows by rows from the target's own features."""
        features = self.model.read(committed.hidden.to(self.model.weight.dtype))
        before = torch.cat([self._newest[slot].unsqueeze(0), features[:-1]])
        ids = torch.tensor([list(tokens)], device=self.device)
        append(self.pool, slot, *self.model.rows(ids, before.unsqueeze(0), committed.positions.unsqueeze(0)))
        self._newest[slot] = features[-1].clone()

    def logits(self, level: Level) -> Tensor:
        """One step over the frontier of every tree."""
        features = self._before(level)
        hidden, rows = self.model(level.ids, features, level.positions, level.mask, level.past(self.pool)[0])
        level.keep(self.pool, [rows])
        for row, (slot, size) in enumerate(zip(level.slots, level.sizes, strict=True)):
            new = hidden[row, :size]
            known = level.growers[row].fed
            self._drafted[slot] = torch.cat([self._drafted[slot], new]) if known else new
        logits: Tensor = self.model.logits(hidden)
        return logits

    def _before(self, level: Level) -> Tensor:
        features = self.model.weight.new_zeros(*level.ids.shape, self.model.config.hidden_size)
        for row, (slot, grower) in enumerate(zip(level.slots, level.growers, strict=True)):
            if not grower.fed:
                features[row, 0] = self._newest[slot]
                continue
            place = {node: column for column, node in enumerate(grower.fed)}
            parents = torch.tensor([place[grower.parents[node]] for node in grower.frontier], device=self.device)
            features[row, : len(parents)] = self._drafted[slot][parents]
        return features
