"""Training for drafts in one pass: masks that follow a packed row's own tokens, many blocks in one forward.

A block is begun after an anchor, any of the row's tokens. Its masks see what the anchor sees, and the masks before them
in the block. Most of the far ones are dropped (each place keeps a share of the anchors of the place before it), so that
the masks cost about as much as the row itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moa.errors import ConfigError
from moa.training.data import Batch


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """How many masks are trained, and how much they count."""

    share: float = 0.25
    """Of the tokens that are anchors: they have the first mask."""
    kept: float = 0.8
    """Of the anchors with one mask that also have the next."""
    weight: float = 1.0
    """Of a mask's loss, beside a token's."""
    unpaired: float = 0.25
    """Share of the masks that are compared without the pair head: a walk's candidates are chosen before it."""

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and 0 < self.kept <= 1 and 0 <= self.unpaired < 1 and self.weight > 0):
            raise ConfigError("blocks: shares must be within 0..1, and the weight above 0")


@dataclass(frozen=True)
class MaskBlocks:
    """The masks of a batch: `anchors` `[B, M]` say after which token a block was begun, and `places` `[M]` how far
    behind that token each mask stands."""

    anchors: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def draw(cls, batch: Batch, seed: int, step: int, *, block: int, share: float, kept: float) -> MaskBlocks:
        """A function of seed, step and row. For a block of 0 there are no masks."""
        length = batch.ids.shape[1]
        counts = np.array([round(length * share * kept**place) for place in range(block - 1)], np.int64)
        orders = [np.random.default_rng([seed, step, int(row)]).permutation(length) for row in batch.rows]
        anchors = np.stack([np.concatenate([order[:0], *(order[:count] for count in counts)]) for order in orders])
        return cls(anchors, np.repeat(np.arange(1, block), counts))

    @property
    def ids(self) -> Tensor:
        """`[B, M]`: the masks' ids."""
        return torch.from_numpy(np.broadcast_to(-self.places, self.anchors.shape).copy())

    @property
    def at(self) -> NDArray[np.int64]:
        """`[B, M]`: the token in whose place each mask stands; it can be past the row's end."""
        return self.anchors + self.places

    def counted(self, batch: Batch) -> NDArray[np.bool_]:
        """`[B, M]`: whether a mask has a wanted next token in its anchor's document."""
        length = batch.ids.shape[1]
        following = np.minimum(self.at + 1, length - 1)
        starts = np.arange(length) - batch.positions
        same = np.take_along_axis(starts, following, 1) == np.take_along_axis(starts, self.anchors, 1)
        wanted = np.take_along_axis(batch.wanted & (batch.segments > 0), following, 1)
        counted: NDArray[np.bool_] = (self.at + 1 < length) & wanted & same
        return counted

    def positions(self, batch: Batch) -> Tensor:
        """`[B, M]`: positions in the document."""
        return torch.from_numpy(np.take_along_axis(batch.positions, self.anchors, 1) + self.places)

    def reading(self, allowed: Tensor) -> Tensor:
        """`allowed` `[B, L, K]` with a row for every mask: it sees what its anchor sees. `[B, L + M, K]`."""
        anchors = torch.from_numpy(self.anchors).unsqueeze(2).expand(-1, -1, allowed.shape[2])
        return torch.cat([allowed, allowed.gather(1, anchors)], 1)

    def seen(self, allowed: Tensor) -> Tensor:
        """The same, with a column for every mask: `[B, L + M, K + M]`."""
        rows = self.reading(allowed)
        anchors, places = torch.from_numpy(self.anchors), torch.from_numpy(self.places)
        masks = torch.zeros(*rows.shape[:2], len(places), dtype=torch.bool)
        same = anchors.unsqueeze(2) == anchors.unsqueeze(1)
        masks[:, allowed.shape[1] :] = same & (places.view(1, -1) <= places.view(-1, 1))
        return torch.cat([rows, masks], 2)
