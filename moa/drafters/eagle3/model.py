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
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from moa.config import TargetFacts
from moa.drafters.eagle3.config import Eagle3Config
from moa.drafters.features import FeatureModel, normed, run_layer, self_rows
from moa.errors import ConfigError, UsageError
from moa.model.blocks import Block, RMSNorm
from moa.model.borrowed import Rows, SharedWeights
from moa.model.checkpoint import filled, stored_weights

_PICKLE = "pytorch_model.bin"
LAYER = ("midlayer.", "layers.0.")
"""What the authors and SpecForge, and what `speculators` call the decoder layer."""
_IGNORED = ("t2d", "d2t", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")


class Eagle3Drafter(FeatureModel):
    """One Llama layer on features, with a vocabulary of its own."""

    name = "eagle3"
    config: Eagle3Config
    reads_first = False

    def __init__(
        self, config: Eagle3Config, words: Tensor | None, vocab_size: int, shared: SharedWeights
    ) -> None:
        """`shared` are embedding and head, its own or the target's, without scale or soft cap."""
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        layer, width = config.layer, config.layer.hidden_size
        eps = layer.rms_norm_eps
        heads = layer.num_attention_heads
        kv_heads = layer.num_key_value_heads or heads
        head_dim = layer.head_dim or width // heads
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
        attention.head_dim = head_dim
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            setattr(attention, name, nn.Linear(2 * width, count * head_dim, bias=False))
        attention.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.norm = RMSNorm(width, eps)
        self.words = words
        # Kept outside the module tree: rotary frequencies stay in float32, and tables may be the
        # target's.
        with torch.device(shared.embedding.device):
            self._rotary = (LlamaRotaryEmbedding(layer),)
        self.shared = shared

    @classmethod
    def load(
        cls,
        folder: Path,
        facts: TargetFacts,
        shared: SharedWeights,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """From its folder, beside its target, in the target's precision unless told another."""
        config = Eagle3Config.read(folder, facts)
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
        model.to(device=like.device, dtype=dtype or like.dtype)
        return model.eval().requires_grad_(False)

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
            self.layer, self._join(ids, features)[0], *self._cos_sin(features, positions)
        )

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The predicted feature at each token, and the cache rows."""
        joined, normed = self._join(ids, features)
        residual = normed if self.config.norm_before_residual else features
        hidden, rows = run_layer(
            self.layer, residual, joined, *self._cos_sin(features, positions), mask, past
        )
        return (self.norm(hidden) if self.config.norm_output else hidden), rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over `words` after a predicted feature."""
        return self.shared.logits(hidden if self.config.norm_output else self.norm(hidden))

    def _join(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.layer.input_layernorm(self.shared.embed(ids))
        normed = self.hidden_norm(features)
        return torch.cat([embedded, normed], dim=-1), normed

    def _cos_sin(self, features: Tensor, positions: Tensor) -> Rows:
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
