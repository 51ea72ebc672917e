"""EAGLE-3 drafters that others have published, in the layouts of the EAGLE authors, SpecForge and
`speculators`.

Low, middle and high states of the target, side by side, are fused into a feature. One decoder layer
reads the normed embedding of token p and the normed feature of p - 1 side by side, on the feature's
residual; after the first drafted token it reads its own output. The head is over a vocabulary of
its own, which `d2t` maps to the target's. Checkpoints differ in the names of weights, in where the
config has the layer's dimensions, and in norms (EAGLE-3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moa.config import TargetFacts, read_config
from moa.errors import ConfigError, UsageError
from moa.model.blocks import Block, RMSNorm
from moa.model.borrowed import Rows, SharedWeights
from moa.model.checkpoint import filled, stored_weights
from moa.model.features import FeatureModel, normed, run_layer, self_rows
from moa.model.loading import first_line

FILES = ("config.json", "model*.safetensors")
_PICKLE = "pytorch_model.bin"
LAYER = ("midlayer.", "layers.0.")
"""What the authors and SpecForge, and what `speculators` call the decoder layer."""
_IGNORED = ("t2d", "d2t", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """What a checkpoint's `config.json` says, whichever layout it has."""

    layer: LlamaConfig
    """The decoder layer's dimensions and rotary embedding."""
    taps: tuple[int, ...]
    """The target's layers whose inputs are read, counted from 0."""
    target_hidden_size: int
    norm_before_residual: bool
    """The layer's residual is the normed feature."""
    norm_before_fc: bool
    """One norm over all states side by side."""
    fc_norm: bool
    """A norm for each of them."""
    norm_output: bool
    """What is fed back is the output behind the last norm."""

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts) -> Self:
        """Read `config.json`, and refuse what is no EAGLE-3 of one Llama layer for this target."""
        values = read_config(folder)
        own = values.get("eagle_config") or {}
        described = values.get("transformer_layer_config") or values
        kind = described.get("model_type", "llama") if isinstance(described, dict) else None
        if not isinstance(own, dict) or kind != "llama" or not is_eagle3(values):
            raise ConfigError(
                f"{folder}: config.json is not that of an EAGLE-3 drafter with a Llama layer"
            )
        try:
            layer = LlamaConfig(**described)
            width = values.get("target_hidden_size") or facts.hidden_size
            config = cls(
                layer=layer,
                taps=_taps(values, own, facts.layers),
                target_hidden_size=int(width),
                **{name: bool({**values, **own}.get(name)) for name in NORMS},
            )
        except Exception as error:  # the library raises whatever an odd value runs into
            raise ConfigError(
                f"{folder}: config.json cannot be read: {first_line(error)}"
            ) from None
        config._check(folder, facts)
        return config

    def _check(self, folder: Path, facts: TargetFacts) -> None:
        layer = self.layer
        if (
            layer.num_hidden_layers != 1
            or layer.attention_bias
            or layer.mlp_bias
            or layer.hidden_act != "silu"
        ):
            raise ConfigError(
                f"{folder}: only EAGLE-3 drafters of one Llama layer without biases are supported"
            )
        if self.target_hidden_size != facts.hidden_size:
            raise ConfigError(
                f"{folder}: made for another target: it reads states of {self.target_hidden_size} numbers, this "
                f"target's have {facts.hidden_size}"
            )
        if not self.taps or not all(0 <= tap < facts.layers for tap in self.taps):
            raise ConfigError(
                f"{folder}: it reads layers {list(self.taps)}, the target has 0..{facts.layers - 1}"
            )
        sizes = (
            layer.hidden_size,
            layer.intermediate_size,
            layer.num_attention_heads,
            layer.num_key_value_heads,
        )
        if (
            min(sizes) < 1
            or layer.num_attention_heads % layer.num_key_value_heads
            or layer.head_dim % 2
        ):
            raise ConfigError(f"{folder}: the dimensions of its layer do not fit each other")


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an EAGLE-3 drafter."""
    listed = values.get("architectures")
    names = [
        str(values.get("speculators_model_type")),
        *map(str, listed if isinstance(listed, list) else ()),
    ]
    # The authors' configs are those of a plain Llama with a vocabulary for drafts.
    return any("eagle3" in name.lower() for name in names) or "draft_vocab_size" in values


def _taps(values: Mapping[str, Any], own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers whose inputs are read. In `eagle_config` (SpecForge) a number is the layer whose
    output it is; at the top level (`speculators`, vLLM) the layer whose input it is; without either
    it is the authors' rule."""
    if (inputs := values.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return tuple(int(number) for number in inputs)
    if (outputs := own.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return tuple(int(number) + 1 for number in outputs)
    return authors_taps(layers)


def authors_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high, by the authors' rule."""
    return 2, layers // 2, layers - 3


class PublishedEagle3(FeatureModel):
    """The drafter."""

    reads_first = False

    def __init__(
        self, config: PublishedConfig, words: Tensor | None, vocab_size: int, shared: SharedWeights
    ) -> None:
        """`shared` are embedding and head, its own or the target's, without scale or soft cap."""
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        layer, width = config.layer, config.layer.hidden_size
        eps = layer.rms_norm_eps
        heads = layer.num_attention_heads
        kv_heads = layer.num_key_value_heads
        states = len(config.taps) * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(states, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps) for _ in config.taps
            )
        self.fc = nn.Linear(states, width, bias=False)
        self.layer = Block(width, heads, kv_heads, layer.intermediate_size, eps)
        self.hidden_norm = RMSNorm(width, eps)
        attention = self.layer.self_attn
        attention.head_dim = layer.head_dim
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            setattr(attention, name, nn.Linear(2 * width, count * layer.head_dim, bias=False))
        attention.o_proj = nn.Linear(heads * layer.head_dim, width, bias=False)
        self.norm = RMSNorm(width, eps)
        self.words = words
        # Kept outside the module tree: rotary frequencies stay in float32, and tables may be the
        # target's.
        with torch.device(shared.embedding.device):
            self._rotary = (LlamaRotaryEmbedding(layer),)
        self.shared = shared

    @classmethod
    def load(cls, folder: Path, facts: TargetFacts, shared: SharedWeights) -> Self:
        """From its folder, beside its target, in the target's precision."""
        config = PublishedConfig.read(folder, facts)
        found = {name.removeprefix("model."): value for name, value in _stored(folder).items()}
        words = _words(folder, found, facts.vocab_size)
        head = found.pop("lm_head.weight", None)
        table = found.pop("embed_tokens.weight", None)
        if table is None or torch.equal(table.to(shared.embedding), shared.embedding):
            table = shared.embedding
        if head is None and words is None:
            head = shared.head
        size = facts.vocab_size if words is None else len(words)
        width = config.layer.hidden_size
        if head is None or tuple(head.shape) != (size, width):
            raise ConfigError(f"{folder}: its head must have the shape {[size, width]}")
        if len(table) < facts.vocab_size or table.shape[1] != width:
            raise ConfigError(
                f"{folder}: its embedding must have the shape {[facts.vocab_size, width]}"
            )
        like = shared.embedding
        words = None if words is None else words.to(like.device)
        own = SharedWeights(table.to(like), head.to(like))
        state = {_own_name(n): value for n, value in found.items() if not n.startswith(_IGNORED)}
        model = filled(lambda: cls(config, words, facts.vocab_size, own), state, folder)
        return model.to(like).eval().requires_grad_(False)

    def read(self, features: Tensor) -> Tensor:
        """Norm and fuse the target's states."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            features = normed(self.fc_norm, features)
        fused: Tensor = self.fc(features)
        return fused

    def rows(self, ids: Tensor, features: Tensor, positions: Tensor) -> Rows:
        """Cache rows of tokens that need no logits."""
        return self_rows(
            self.layer, self._join(ids, features)[0], *self._turns(features, positions)
        )

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        joined, normed = self._join(ids, features)
        residual = normed if self.config.norm_before_residual else features
        hidden, rows = run_layer(
            self.layer, residual, joined, *self._turns(features, positions), mask, past
        )
        return (self.norm(hidden) if self.config.norm_output else hidden), rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over `words` after a predicted feature."""
        return self.shared.logits(hidden if self.config.norm_output else self.norm(hidden))

    def _join(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.layer.input_layernorm(self.shared.embed(ids))
        normed = self.hidden_norm(features)
        return torch.cat([embedded, normed], dim=-1), normed

    def _turns(self, features: Tensor, positions: Tensor) -> Rows:
        cos, sin = self._rotary[0](features, positions)
        return cos, sin


def _stored(folder: Path) -> dict[str, Tensor]:
    if (folder / _PICKLE).exists() and not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{folder / _PICKLE} is a pickle, which is never read; if you trust its author, convert it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    return stored_weights(folder)


def _words(folder: Path, found: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's ids of the draft vocabulary: `d2t` holds how much larger each is than its own
    number."""
    if (offsets := found.get("d2t")) is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise ConfigError(f"{folder}: d2t must be a row of whole numbers")
    words = torch.arange(len(offsets)) + offsets.long()
    if not len(words) or int(words.min()) < 0 or int(words.max()) >= vocab_size:
        raise ConfigError(f"{folder}: d2t leaves the target's vocabulary of {vocab_size} tokens")
    known = found.get("t2d")
    if known is not None and not torch.equal(known.nonzero().flatten(), words.unique()):
        raise ConfigError(f"{folder}: t2d and d2t do not describe the same vocabulary")
    return words


def _own_name(name: str) -> str:
    for theirs in LAYER:
        if name.startswith(theirs):
            own = name.removeprefix(theirs)
            return own if own.startswith("hidden_norm.") else f"layer.{own}"
    return name
