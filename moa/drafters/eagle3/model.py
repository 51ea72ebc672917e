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
        self,
        config: Eagle3Config,
        draft_tokens: Tensor | None,
        vocab_size: int,
        shared: SharedWeights,
    ) -> None:
        """Make the layers of this shape, whose weights are loaded later. `draft_tokens` are the
        target's ids of the drafter's smaller vocabulary, None if it has the target's. `shared` are
        embedding and head, its own or the target's, without scale or soft cap."""
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        layer = config.layer
        width = layer.hidden_size
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
        _widen_inputs(self.layer, heads, kv_heads, head_dim)
        self.norm = RMSNorm(width, eps)
        self.draft_tokens = draft_tokens
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
        """Load a published checkpoint from its folder, frozen, in the target's precision unless
        `dtype` says another. `shared` are the target's embedding and head, used where it has
        none."""
        config = Eagle3Config.read(folder, facts)
        stored = {name.removeprefix("model."): value for name, value in _stored(folder).items()}
        draft_tokens = _draft_tokens(folder, stored, facts.vocab_size)
        own = _own_tables(folder, stored, shared, config, facts.vocab_size, draft_tokens)
        like = shared.embedding
        if draft_tokens is not None:
            draft_tokens = draft_tokens.to(like.device)
        state = {}
        for name, value in stored.items():
            if not name.startswith(_IGNORED):
                state[_own_name(name)] = value
        model = filled(lambda: cls(config, draft_tokens, facts.vocab_size, own), state, folder)
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
        layer_input, _ = self._join(ids, features)
        cos, sin = self._cos_sin(features, positions)
        return self_rows(self.layer, layer_input, cos, sin)

    def step(
        self, ids: Tensor, features: Tensor, positions: Tensor, mask: Tensor, past: Rows
    ) -> tuple[Tensor, Rows]:
        """The feature that is predicted after each token, `[B, T, width]`, and the keys and values
        of the tokens. `features` are those of the tokens before them."""
        layer_input, normed_features = self._join(ids, features)
        residual = normed_features if self.config.norm_before_residual else features
        cos, sin = self._cos_sin(features, positions)
        hidden, rows = run_layer(self.layer, residual, layer_input, cos, sin, mask, past)
        if self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden, rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over `draft_tokens` after a predicted feature."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        return self.shared.logits(hidden)

    def _join(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input, `[..., 2 * width]`, and the normed features in it."""
        embedded = self.layer.input_layernorm(self.shared.embed(ids))
        normed_features = self.hidden_norm(features)
        return torch.cat([embedded, normed_features], dim=-1), normed_features

    def _cos_sin(self, features: Tensor, positions: Tensor) -> Rows:
        """The rotation at these positions, in the precision of `features`."""
        cos, sin = self._rotary[0](features, positions)
        return cos, sin


def _widen_inputs(layer: Block, heads: int, kv_heads: int, head_dim: int) -> None:
    """Make a layer's attention read embedding and feature side by side: its projections are twice
    as wide as others, and its heads may have another width than a share of the layer's."""
    attention = layer.self_attn
    width = layer.mlp.down_proj.out_features
    attention.head_dim = head_dim
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        setattr(attention, name, nn.Linear(2 * width, count * head_dim, bias=False))
    attention.o_proj = nn.Linear(heads * head_dim, width, bias=False)


def _own_tables(
    folder: Path,
    stored: dict[str, Tensor],
    shared: SharedWeights,
    config: Eagle3Config,
    vocab_size: int,
    draft_tokens: Tensor | None,
) -> SharedWeights:
    """The embedding and head of a checkpoint, taken out of its weights `stored`; the target's
    (`shared`) where it has none. An embedding that equals the target's is not kept twice."""
    head = stored.pop("lm_head.weight", None)
    embedding = stored.pop("embed_tokens.weight", None)
    if embedding is None or torch.equal(embedding.to(shared.embedding), shared.embedding):
        embedding = shared.embedding
    # The target's head is of use only to a drafter of the target's whole vocabulary.
    if head is None and draft_tokens is None:
        head = shared.head
    size = vocab_size if draft_tokens is None else len(draft_tokens)
    width = config.layer.hidden_size
    if head is None or tuple(head.shape) != (size, width):
        raise ConfigError(f"{folder}: its head must have the shape {[size, width]}")
    if len(embedding) < vocab_size or embedding.shape[1] != width:
        raise ConfigError(f"{folder}: its embedding must have the shape {[vocab_size, width]}")
    return SharedWeights(embedding.to(shared.embedding), head.to(shared.embedding))


def _stored(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint as they are named; a pickle is refused."""
    if (folder / _PICKLE).exists() and not any(folder.glob("*.safetensors")):
        raise UsageError(
            f"{folder / _PICKLE} is a pickle, which is never read; if you trust its author, convert it: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    return stored_weights(folder)


def _draft_tokens(folder: Path, stored: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's ids of the tokens that a checkpoint can draft, in the order of its head; None if
    it can draft all. `d2t` holds, for each row of the head, how much larger the target's id is than
    the number of the row."""
    offsets = stored.get("d2t")
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise ConfigError(f"{folder}: d2t must be a row of whole numbers")
    draft_tokens = torch.arange(len(offsets)) + offsets.long()
    if (
        not len(draft_tokens)
        or int(draft_tokens.min()) < 0
        or int(draft_tokens.max()) >= vocab_size
    ):
        raise ConfigError(f"{folder}: d2t leaves the target's vocabulary of {vocab_size} tokens")
    known = stored.get("t2d")  # a flag for each token of the target: whether it can be drafted
    if known is not None and not torch.equal(known.nonzero().flatten(), draft_tokens.unique()):
        raise ConfigError(f"{folder}: t2d and d2t do not describe the same vocabulary")
    return draft_tokens


def _own_name(name: str) -> str:
    """What a weight of a checkpoint is called here."""
    for prefix in LAYER:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            # Publishers have this norm within the layer, here it belongs to the drafter.
            return rest if rest.startswith("hidden_norm.") else f"layer.{rest}"
    return name
