"""The drafter that `moa-train` makes: it drafts from the target's newest states, and from
its own outputs where these are late or never come.

Low, middle, high and final state of token p - 1, each normed, are fused into a feature. A map of
token p is added to it, and one decoder layer to their sum, which is the next final state. Both maps
start as the least-squares solution (`least_squares`), the layer at nothing: it learns
what a linear map cannot say. Its attention also sees the token as it is, to find and copy what
followed it before. Where there are no states its own output, through a map of its own, is the next
token's feature.

On the device a token's feature is kept beside its key and value, as a second layer of the cache. An
activation record holds all three as the target's states make them, and replaces the device's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from moa.config import TargetFacts
from moa.drafters.contract import RecordPair, randomize, to_numpy
from moa.drafters.features import FeatureModel, normed, run_layer, self_rows
from moa.drafters.graph import GraphSpec
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.graph import StateGraph
from moa.manifest import KVHeads
from moa.model.blocks import Block, RMSNorm, rotary
from moa.model.borrowed import Rows, SharedWeights
from moa.model.checkpoint import filled, stored_weights
from moa.records import RecordLayout
from moa.target.torch_target import Committed


class StateDrafter(FeatureModel):
    """fuse(states of p - 1) + token(embedding of p) -> one layer -> final state of p."""

    name = "states"
    config: StateDrafterConfig

    def __init__(self, config: StateDrafterConfig, shared: SharedWeights) -> None:
        """Make the layers of this shape, whose weights are made or loaded later. `shared` are the
        target's embedding and head."""
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        width = config.hidden_size
        eps = config.rms_norm_eps
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.tap_norms = nn.ModuleList(RMSNorm(width, eps) for _ in config.taps)
        self.fuse = nn.Linear(len(config.taps) * width, width, bias=False)
        self.token_norm = RMSNorm(width, eps)
        self.own_norm = RMSNorm(width, eps)
        self.token = nn.Linear(width, width, bias=False)
        self.own = nn.Linear(width, width, bias=False)
        self.layer = Block(width, heads, kv_heads, config.intermediate_size, eps)
        self.scale = nn.Parameter(torch.ones(width))
        self.token_scale = nn.Parameter(torch.ones(width))
        self.shared = shared

    @classmethod
    def new(cls, config: StateDrafterConfig, shared: SharedWeights) -> Self:
        """An untrained drafter beside its target."""
        model = cls(config, shared)
        randomize(model)
        return model.to(shared.head.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        facts: TargetFacts,
        shared: SharedWeights,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a trained drafter from its folder, frozen, in the target's precision unless `dtype`
        says another. `shared` are the target's embedding and head."""
        config = StateDrafterConfig.read(folder, facts)
        model = filled(lambda: cls(config, shared), stored_weights(folder), folder)
        like = shared.embedding
        model.to(device=like.device, dtype=dtype or like.dtype)
        return model.eval().requires_grad_(False)

    def normed(self, states: Tensor) -> Tensor:
        """The target's states `[..., taps * width]`, each normed by itself."""
        return normed(self.tap_norms, states)

    def read(self, features: Tensor) -> Tensor:
        """The feature of the target's states: normed and fused."""
        fused: Tensor = self.fuse(self.normed(features))
        return fused

    def feedback(self, hidden: Tensor) -> Tensor:
        """What stands for the fused states of a token that was only drafted."""
        feature: Tensor = self.own(self.own_norm(hidden))
        return feature

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings of tokens, normed."""
        embedded: Tensor = self.token_norm(self.shared.embed(ids).to(self.weight.dtype))
        return embedded

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        _, layer_input = self._joined(self.embed(ids), features)
        cos, sin = self._cos_sin(positions)
        return self_rows(self.layer, layer_input, cos, sin)

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted state at each token, and the cache rows."""
        return self._run(self.embed(ids), features, positions, mask, past)

    # ---- for the device

    @property
    def record_layout(self) -> RecordLayout:
        """The layout of a record: a row of each layer of the cache."""
        return RecordLayout(self.config.cache)

    @property
    def graph_spec(self) -> GraphSpec:
        """Its cache, all of whose rows records carry."""
        cache = tuple(KVHeads(kv_heads=heads, head_dim=width) for heads, width in self.config.cache)
        return GraphSpec(
            self.config.hidden_size, cache, records=None, borrowed=len(cache), features=True
        )

    def graph_module(self) -> nn.Module:
        """Its layer as a module for export."""
        return StateGraph(self)

    def features(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *,
        feature_rows: Tensor,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """Run one step of one sequence as the device does. Returns the predicted final states, of
        `queries` alone if given, and the new rows of the cache.

        The cache has two layers: keys and values, and a feature of each token, which the token
        after it reads. `feature_rows` `[T]` says for each token in which row the feature that it
        reads lies, -1 where there is none; the cache has one row at least.
        """
        x = self.shared.embed(ids).to(self.weight.dtype)
        return self.states(x, positions, mask, past, feature_rows=feature_rows, queries=queries)

    def states(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: Sequence[Rows],
        *,
        feature_rows: Tensor,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """The same as `features`, for tokens that are embedded already: `x` `[1, T, hidden]`. The
        exported graph begins here."""
        # The cache: keys and values of the layer, and as a second layer both halves of the features.
        layer_past, (low_halves, high_halves) = past
        row_index = feature_rows.clamp(min=0)  # a row to read in any case, which counts for nothing
        low = low_halves[0].index_select(1, row_index)
        high = high_halves[0].index_select(1, row_index)
        has_feature = (feature_rows >= 0).unsqueeze(-1)
        features = torch.cat([low, high], -1) * has_feature
        hidden, layer_rows = self._run(self.token_norm(x), features, positions, mask, layer_past)
        new_low, new_high = self.feedback(hidden).unsqueeze(1).chunk(2, -1)
        if queries is not None:
            hidden = hidden.index_select(1, queries)
        return hidden, [layer_rows, (new_low, new_high)]

    @torch.inference_mode()
    def records(self, pieces: Sequence[Committed]) -> RecordPair:
        """Activation records of n tokens that the target has run, as two arrays `[n, count, width]`
        of `record_layout`. They are rows of the drafter's own cache, made of the target's states:
        the layer's keys and values, and the halves of the features that the next tokens read."""
        dtype = self.weight.dtype
        device = self.weight.device
        states_before: list[Tensor] = []
        tokens: list[int] = []
        for piece in pieces:
            # A token's key and value are made of the states at the token before it.
            states_before += [piece.before_it(), piece.states[:-1]]
            tokens += piece.tokens
        ids = torch.tensor([tokens], device=device)
        positions = torch.cat([piece.positions for piece in pieces])
        features_before = self.read(torch.cat(states_before).to(dtype))
        features = self.read(torch.cat([piece.states for piece in pieces]).to(dtype))
        key, value = self.rows(ids, features_before[None], positions[None])
        low, high = features.chunk(2, -1)
        layout = self.record_layout
        return (
            layout.join([to_numpy(key[0].transpose(0, 1)), to_numpy(low)]),
            layout.join([to_numpy(value[0].transpose(0, 1)), to_numpy(high)]),
        )

    # ---- inside

    def _run(
        self, token: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted states, and the cache rows, of tokens with these embeddings and features."""
        residual, layer_input = self._joined(token, features)
        cos, sin = self._cos_sin(positions)
        x, rows = run_layer(self.layer, residual, layer_input, cos, sin, mask, past)
        return x * self.scale, rows

    def _joined(self, token: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's residual, and its input: there the token is also as it is, for attention to
        find and copy."""
        residual = features + self.token(token)
        return residual, self.layer.input_layernorm(residual) + self.token_scale * token

    def _cos_sin(self, positions: Tensor) -> Rows:
        """The rotation of the layer's queries and keys at these positions."""
        return rotary(positions, self.layer.self_attn.head_dim, self.config.rope_theta)
