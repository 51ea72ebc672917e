"""Tiny random models of every supported family, made on the spot.

The weights are drawn here rather than by the library's initialiser, so that a seed gives the same
model with every transformers release, and so that logits are spread widely enough for an argmax to
mean something.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
PAD = 0
BOS = 1
EOS = 2
UNK = 3
WINDOW = 8  # sliding window of the families that have one: small, so that short tests cross it

MODERN_FAMILIES = (
    "smollm3",
    "olmo3",
    "phi3",
    "granite",
    "glm4",
    "gpt_oss",
    "gemma4",
    "gemma4 dense",
    "qwen3_5",
    "qwen3_next",
    "lfm2",
)
"""Run by the library's layers."""
CHAIN_FAMILIES = ("qwen3_5", "qwen3_next", "lfm2")
"""Those whose layers keep a running state."""

_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4 dense": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_HYBRID_LAYERS = ["sliding_attention", "full_attention"] * 2
_PER_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _HYBRID_LAYERS,
        "query_pre_attn_scalar": 32,
        # Low enough to bend these models' scores: a missing cap must show
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo3": {"sliding_window": WINDOW, "layer_types": _HYBRID_LAYERS},
    "phi3": {
        "sliding_window": 40,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
        },
        "partial_rotary_factor": 0.75,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": _HYBRID_LAYERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    # The last two layers read the keys and values of the second pair; the whole ones are wider.
    "gemma4": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "final_logit_softcapping": 6.0,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "gemma4 dense": {
        "sliding_window": WINDOW,
        "layer_types": _HYBRID_LAYERS,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "qwen3_5": _GATED_DELTA,
    "qwen3_next": {
        **_GATED_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "gemma3": {
        "sliding_window": WINDOW,
        "layer_types": _HYBRID_LAYERS,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
}


def available(family: str) -> bool:
    """Whether this release of transformers has the family, with a cache that we can be."""
    if _MODEL_TYPES.get(family, family) not in CONFIG_MAPPING:
        return False
    return family not in CHAIN_FAMILIES or hasattr(Cache, "get_recurrent_state")


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of `tiny(family, **overrides)`; any transformers `model_type` with the usual field
    names works."""
    settings = {**_COMMON, **_PER_FAMILY.get(family, {}), **overrides}
    layers = settings["num_hidden_layers"]
    if "layer_types" in settings and "layer_types" not in overrides:
        kinds = settings["layer_types"]
        settings["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return AutoConfig.for_model(_MODEL_TYPES.get(family, family), **settings)


def tiny(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode: vocab 128, 4 layers, hidden 64, 4 heads on 2 KV heads,
    head_dim 16."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
    _randomize(model, seed)
    return model.eval()


def save_tiny(family: str, folder: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write `tiny(family)` and a character-level tokenizer the way `from_pretrained` expects them."""
    folder = Path(folder)
    model = tiny(family, seed=seed, **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def tiny_tokenizer(vocab_size: int = 128) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, `<extra_N>` for the ids left over; decoding restores
    the text."""
    pieces = ["<pad>", "<bos>", "<eos>", "<unk>", *string.printable]
    pieces += [f"<extra_{i}>" for i in range(len(pieces), vocab_size)]
    vocab = {piece: i for i, piece in enumerate(pieces[:vocab_size])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def _randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    zero_centred_norms = model.config.model_type.startswith("gemma")  # Gemma scales by (1 + weight)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if tied and name.endswith("model.norm.weight"):
            weight.copy_(5.0 + noise)
        elif "norm" in name:
            weight.copy_(0.2 * noise + (0.0 if zero_centred_norms else 1.0))
        elif "embed_tokens" in name:
            # a tied model repeats its input when the embedding outweighs the layers: small here,
            # large in the last norm
            weight.copy_(noise * (0.05 if tied else 1.0))
        elif weight.ndim == 1:  # biases
            weight.copy_(0.2 * noise)
        else:  # matrices keep the scale of what flows through them; the head spreads the logits
            gain = 3.0 if "lm_head" in name else 1.5
            weight.copy_(noise * gain / weight.shape[-1] ** 0.5)
