"""Baselines that read features: the target's frozen embedding and head, one decoder layer, and its KV cache. Token 0
has no feature before it and reads zeros (EAGLE's public code drops that row)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.baselines.config import BaselineConfig
from moa.model.blocks import Block, rotary
from moa.model.borrowed import Rows, SharedWeights
from moa.model.eagle3 import PublishedEagle3
from moa.model.slots import SlotPool


class FeatureBaseline(nn.Module):
    """A `FeatureModel` with the target's embedding and head."""

    reads_first = True
    words: Tensor | None = None

    def __init__(self, config: BaselineConfig, shared: SharedWeights) -> None:
        super().__init__()
        self.config = config
        # In a tuple, so that it is not trained, saved or copied.
        self._shared_with_target = (shared,)

    @property
    def shared(self) -> SharedWeights:
        """The target's embedding and head."""
        return self._shared_with_target[0]

    @property
    def weight(self) -> Tensor:
        """A weight of the model, to read dtype and device from."""
        return next(self.parameters())

    def embed(self, ids: Tensor) -> Tensor:
        """The target's token embeddings, in the drafter's precision."""
        return self.shared.embed(ids).to(self.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head."""
        return self.shared.logits(hidden)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions."""
        return rotary(positions, self.config.head_dim, self.config.rope_theta)

    def empty_rows(self, ids: Tensor) -> Rows:
        """An empty past."""
        none = self.weight.new_zeros(ids.shape[0], self.config.kv_heads, 0, self.config.head_dim)
        return none, none

    def block(self) -> Block:
        """A decoder layer of the config's shape."""
        config = self.config
        return Block(config.hidden_size, config.heads, config.kv_heads, config.intermediate_size, config.rms_norm_eps)

    def pool(self, slots: int, capacity: int) -> SlotPool:
        """Memory for the keys and values of `slots` sequences."""
        return SlotPool(
            layers=1,
            slots=slots,
            kv_heads=self.config.kv_heads,
            capacity=capacity,
            head_dim=self.config.head_dim,
            dtype=self.weight.dtype,
            device=self.weight.device,
        )

    @property
    def feature_size(self) -> int:
        """The target's width."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary."""
        return self.config.vocab_size

    def read(self, features: Tensor) -> Tensor:
        """Preprocess the target's states; a drafted feature is used as it is."""
        return features

    def again(self, hidden: Tensor) -> Tensor:
        """The feature that stands for a drafted token's: its own state."""
        return hidden

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        raise NotImplementedError

    def step(self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        raise NotImplementedError


def shifted(features: Tensor, positions: Tensor) -> Tensor:
    """`[B, L, H]` by one place: the feature before each token, zeros at the first of a document."""
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    return before * (positions > 0).unsqueeze(-1).to(features.dtype)


BESIDE_TARGET = ("layer_self_attention.", "Ekv2E.", "final_state.", "tap_norms.", "fuse.", "absent")
"""Parts that run on the server, beside the target."""
_OF_EAGLE3 = ("fc.", "fc_norm.")


def parameter_count(module: nn.Module, *, device_only: bool = False) -> int:
    """Trainable parameters, of all parts or only of those that draft."""
    beside = _OF_EAGLE3 if isinstance(module, PublishedEagle3) else BESIDE_TARGET
    return sum(
        p.numel()
        for name, p in module.named_parameters()
        if p.requires_grad and not (device_only and name.startswith(beside))
    )
