"""The drafter that `moa-train --states` makes: it drafts from the target's newest states, and from
its own outputs where these are late or never come.

Low, middle, high and final state of token p - 1, each normed, are fused into a feature. A map of
token p is added to it, and one decoder layer to their sum, which is the next final state. Both maps
start as the least-squares solution (moa/training/least_squares.py), the layer at nothing: it learns
what a linear map cannot say. Its attention also sees the token as it is, to find and copy what
followed it before. Where there are no states its own output, through a map of its own, is the next
token's feature.

On the device a token's feature is kept beside its key and value, as a second layer of the cache. An
activation record holds all three as the target's states make them, and replaces the device's own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moa.config import DrafterConfig, TargetFacts, read_config
from moa.errors import ConfigError
from moa.model.blocks import Block, RMSNorm, rotary
from moa.model.borrowed import Rows, SharedWeights
from moa.model.checkpoint import filled, stored_weights
from moa.model.eagle3 import authors_taps
from moa.model.features import FeatureModel, normed, run_layer, self_rows
from moa.model.target import Committed
from moa.records import RecordLayout


@dataclass(frozen=True, kw_only=True)
class StateDrafterConfig:
    """The drafter's `config.json`. Its width, embedding and head are the target's."""

    MODEL_TYPE: ClassVar = "moa-edge-state-drafter"

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    target_layers: int
    rms_norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self) if f.type == "int"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name, value in (("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {value!r}")
        if self.target_layers < 3:
            raise ConfigError(
                "the target has too few layers: its states are read behind three of them"
            )
        heads = self.num_attention_heads
        if self.hidden_size % (2 * heads) or heads % self.num_key_value_heads:
            raise ConfigError(
                f"{heads} heads on {self.num_key_value_heads} KV heads do not fit its width"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads; the number behind the last is the final state."""
        return (*authors_taps(self.target_layers), self.target_layers)

    @property
    def cache(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the device's cache: the layer's keys and values, and the two halves of
        a feature."""
        width = self.hidden_size
        return (self.num_key_value_heads, width // self.num_attention_heads), (1, width // 2)

    @classmethod
    def for_target(cls, facts: TargetFacts, **overrides: int) -> Self:
        """The default shape: heads and feed-forward of the device's drafter."""
        like = DrafterConfig.for_target(facts)
        shape: dict[str, Any] = {
            "hidden_size": facts.hidden_size,
            "num_attention_heads": like.num_attention_heads,
            "num_key_value_heads": like.self_attention_num_key_value_heads,
            "intermediate_size": like.self_attention_intermediate_size,
            "vocab_size": facts.vocab_size,
            "target_layers": facts.layers,
            "rms_norm_eps": facts.rms_norm_eps,
            "rope_theta": facts.rope_theta,
        }
        return cls(**shape | overrides)

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts) -> Self:
        """Read `config.json`, and refuse a drafter of another target."""
        values = read_config(folder, "drafter")
        if (kind := values.pop("model_type", None)) != cls.MODEL_TYPE:
            raise ConfigError(
                f"{folder}: model_type is {kind!r}: a server's drafter is an EAGLE-3, or made by `moa-train --states`"
            )
        try:
            if names := {field.name for field in dataclasses.fields(cls)} ^ set(values):
                raise ConfigError(
                    f"{min(names)} is {'unknown' if min(names) in values else 'missing'}"
                )
            config = cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{folder / 'config.json'}: {error}") from None
        own = config.hidden_size, config.vocab_size, config.target_layers
        if own != (theirs := (facts.hidden_size, facts.vocab_size, facts.layers)):
            raise ConfigError(
                f"{folder}: made for another target: width, vocabulary and layers are {own}, the target's {theirs}"
            )
        return config

    def write(self, folder: Path) -> None:
        """Write `config.json`."""
        values = {"model_type": self.MODEL_TYPE, **dataclasses.asdict(self)}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class StateDrafter(FeatureModel):
    """fuse(states of p - 1) + token(embedding of p) -> one layer -> final state of p."""

    def __init__(self, config: StateDrafterConfig, shared: SharedWeights) -> None:
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
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        return model.to(shared.head.device)

    @classmethod
    def load(cls, folder: Path, facts: TargetFacts, shared: SharedWeights) -> Self:
        """A trained one beside its target, in the target's precision."""
        config = StateDrafterConfig.read(folder, facts)
        model = filled(lambda: cls(config, shared), stored_weights(folder), folder)
        return model.to(shared.embedding).eval().requires_grad_(False)

    def normed(self, states: Tensor) -> Tensor:
        """The target's states side by side, each normed."""
        return normed(self.tap_norms, states)

    def read(self, features: Tensor) -> Tensor:
        """The target's states, fused."""
        fused: Tensor = self.fuse(self.normed(features))
        return fused

    def again(self, hidden: Tensor) -> Tensor:
        """What stands for the fused states of a token that was only drafted."""
        found: Tensor = self.own(self.own_norm(hidden))
        return found

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings of tokens, normed."""
        found: Tensor = self.token_norm(self.shared.embed(ids).to(self.weight.dtype))
        return found

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(
            self.layer, self._joined(self.embed(ids), features)[1], *self._turns(positions)
        )

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted state at each token, and the cache rows."""
        return self._run(self.embed(ids), features, positions, mask, past)

    # ---- for the device

    @property
    def layout(self) -> RecordLayout:
        """The layout of a record: a row of each layer of the cache."""
        return RecordLayout(self.config.cache)

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
        """A step of one sequence on the device: predicted states, of `queries` alone if given, and
        rows of the cache. `feature_rows` `[T]` are the rows in which the tokens' features lie, -1
        where there is none; the cache has one row at least."""
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
        """`features` after embedded tokens."""
        own, halves = past
        found = torch.cat(
            [half[0].index_select(1, feature_rows.clamp(min=0)) for half in halves], -1
        )
        features = found * (feature_rows >= 0).unsqueeze(-1)
        hidden, rows = self._run(self.token_norm(x), features, positions, mask, own)
        low, high = self.again(hidden).unsqueeze(1).chunk(2, -1)
        return hidden if queries is None else hidden.index_select(1, queries), [rows, (low, high)]

    @torch.inference_mode()
    def whole_records(
        self, pieces: Sequence[Committed]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Activation records of tokens that the target has run, `[n, *]` of `layout`."""
        dtype = self.weight.dtype
        device = self.weight.device
        before = torch.cat(
            [part for piece in pieces for part in (piece.before_it(), piece.states[:-1])]
        )
        ids = torch.tensor([token for piece in pieces for token in piece.tokens], device=device)
        positions = torch.cat([piece.positions for piece in pieces])
        found = self.read(torch.cat([piece.states for piece in pieces]).to(dtype))
        rows = self.rows(ids[None], self.read(before.to(dtype))[None], positions[None])
        key, value = (
            self.layout.join(
                [part.float().cpu().numpy() for part in (row[0].transpose(0, 1), half)]
            )
            for row, half in zip(rows, found.chunk(2, -1), strict=True)
        )
        return key, value

    # ---- inside

    def _run(
        self, token: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        x, rows = run_layer(
            self.layer, *self._joined(token, features), *self._turns(positions), mask, past
        )
        return x * self.scale, rows

    def _joined(self, token: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        joined = features + self.token(token)
        return joined, self.layer.input_layernorm(joined) + self.token_scale * token

    def _turns(self, positions: Tensor) -> Rows:
        return rotary(positions, self.layer.self_attn.head_dim, self.config.rope_theta)


def is_states(folder: Path) -> bool:
    """Whether this is such a drafter."""
    return read_config(folder, "drafter").get("model_type") == StateDrafterConfig.MODEL_TYPE
