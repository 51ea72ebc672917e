"""What a drafter has beside its body to draft a block in one pass: the masks' embeddings, and the pair head.

A block is the last token and the masks after it. Token ids below zero stand for masks: -k for the one k places after
the last token. A mask's state predicts the token after its position, not knowing the tokens between; the pair head then
adds what follows from the token before:

    logits = head(hidden + after(before(embedding of the token before) * gates(hidden)))

The head is linear, so beside it the sum is one of pairs of tokens, which `moa.block` walks without the model. A logit
cap comes later in the walk than in training: to a capped target's drafts the pair head's share is a little too strong.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from moa.block import Pairs
from moa.model.shared import SharedWeights


class BlockHead(nn.Module):
    """Embeddings of `block - 1` masks, and a pair head of some rank."""

    def __init__(self, width: int, block: int, rank: int) -> None:
        super().__init__()
        self.masks = nn.Embedding(block - 1, width)
        nn.init.normal_(self.masks.weight, std=0.02)
        self.before = nn.Linear(width, rank, bias=False)
        self.state = nn.Linear(width, rank, bias=False)
        self.after = nn.Linear(rank, width, bias=False)

    def embed(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """The embedded `tokens`, with the masks among `ids` in their places."""
        masks = self.masks((-1 - ids).clamp(min=0))
        return torch.where((ids < 0).unsqueeze(-1), masks.to(tokens.dtype), tokens)

    def gates(self, hidden: Tensor) -> Tensor:
        """How strongly each number of the pair head counts at a position."""
        return 1.0 + self.state(hidden)

    def informed(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """States of masks that know the embedding of the token at their position."""
        told: Tensor = hidden + self.after(self.before(previous) * self.gates(hidden))
        return told

    @torch.no_grad()
    def pairs(self, shared: SharedWeights, vocabulary: int, ids: np.ndarray | None = None) -> Pairs:
        """The pair head's tables, for the whole vocabulary or the tokens `ids` of a reduced one."""
        tokens = torch.arange(vocabulary) if ids is None else torch.from_numpy(ids)
        tokens = tokens.to(shared.embedding.device)
        weight = self.before.weight
        before = self.before(shared.embed(tokens).to(weight.dtype))
        after = shared.head[tokens].to(weight.dtype) @ self.after.weight
        return Pairs(before.float().cpu().numpy(), after.float().cpu().numpy(), ids)
