"""Random EAGLE-3 checkpoints in the layouts that others publish, and their forward by the public
formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LAYOUTS = ("authors", "specforge", "specforge-3.1", "speculators")
WIDTH, HEADS, KV_HEADS, HEAD, MIDDLE, EPS = 48, 4, 2, 16, 72, 1e-5
"""Unlike the tiny target's own in all but the width of the target's states."""

Weights = dict[str, Tensor]


def layer_config(vocab_size: int) -> dict[str, Any]:
    """The Llama fields."""
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": 20000.0,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
    }


def flags(layout: str) -> dict[str, bool]:
    """What the layout's norms are in these tests."""
    newest = layout == "specforge-3.1"
    return {
        "fc_norm": newest,
        "norm_output": newest,
        "norm_before_residual": layout == "speculators",
        "norm_before_fc": layout == "speculators",
    }


def write(folder: Path, layout: str, target: Any, words: Sequence[int]) -> Weights:
    """A checkpoint for this target whose draft vocabulary is `words`; its weights, under our names."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(layout))
    vocab = target.config.vocab_size
    states = 3 * target.config.hidden_size

    def some(*shape: int) -> Tensor:
        return torch.randn(shape) * shape[-1] ** -0.5

    layer = {
        "self_attn.q_proj.weight": some(HEADS * HEAD, 2 * WIDTH),
        "self_attn.k_proj.weight": some(KV_HEADS * HEAD, 2 * WIDTH),
        "self_attn.v_proj.weight": some(KV_HEADS * HEAD, 2 * WIDTH),
        "self_attn.o_proj.weight": some(WIDTH, HEADS * HEAD),
        "mlp.gate_proj.weight": some(MIDDLE, WIDTH),
        "mlp.up_proj.weight": some(MIDDLE, WIDTH),
        "mlp.down_proj.weight": some(WIDTH, MIDDLE),
    }
    layer |= {
        f"{name}.weight": 1 + 0.3 * torch.randn(WIDTH)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    rest = {"fc.weight": some(WIDTH, states), "norm.weight": 1 + 0.3 * torch.randn(WIDTH)}
    if flags(layout)["fc_norm"]:
        rest |= {f"fc_norm.{tap}.weight": 1 + 0.3 * torch.randn(states // 3) for tap in range(3)}
    if flags(layout)["norm_before_fc"]:
        rest["input_norm.weight"] = 1 + 0.3 * torch.randn(states)
    rest |= {
        "lm_head.weight": 3 * some(len(words), WIDTH),
        "embed_tokens.weight": some(vocab, WIDTH),
    }
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    known = torch.zeros(vocab, dtype=torch.bool)
    known[list(words)] = True
    maps = {"d2t": torch.tensor(words) - torch.arange(len(words)), "t2d": known}
    stored = {**{prefix + name: value for name, value in layer.items()}, **rest, **maps}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config(layout, vocab, len(words), target.config.hidden_size))
    )
    return {**{f"layer.{name}": value for name, value in layer.items()}, **rest}


def config(layout: str, vocab: int, words: int, width: int) -> dict[str, Any]:
    """`config.json` of a layout. The layers are 1, 2 and 3 of four in every way of counting."""
    fields = layer_config(vocab)
    if layout == "speculators":
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": words,
            "transformer_layer_config": fields,
            "target_hidden_size": width,
            **flags(layout),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": words,
        "target_hidden_size": width,
    }
    if layout == "authors":
        return fields
    return (
        fields | flags(layout) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    )


def forward(weights: Weights, layout: str, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and what is fed back, over a whole text: token p with the feature before it. `[T]` and
    `[T, *]`."""
    on = flags(layout)
    count = len(ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], EPS)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"layer.{name}.weight"])

    embedded = norm(weights["embed_tokens.weight"][ids], "layer.input_layernorm")
    normed = norm(features, "layer.hidden_norm")
    joined = torch.cat([embedded, normed], -1)
    query, key, value = (
        project(joined, f"self_attn.{name}_proj").view(1, count, -1, HEAD).transpose(1, 2)
        for name in "qkv"
    )
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**layer_config(8)))(
        joined, torch.arange(count)[None]
    )
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    seen = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x = normed if on["norm_before_residual"] else features
    x = x + project(seen.transpose(1, 2).reshape(count, -1), "self_attn.o_proj")
    inner = norm(x, "layer.post_attention_layernorm")
    x = x + project(
        silu(project(inner, "mlp.gate_proj")) * project(inner, "mlp.up_proj"), "mlp.down_proj"
    )
    return linear(norm(x, "norm"), weights["lm_head.weight"]), norm(x, "norm") if on[
        "norm_output"
    ] else x


def fused(weights: Weights, layout: str, states: Tensor) -> Tensor:
    """The features of the target's states `[T, 3 * H]`."""
    if flags(layout)["norm_before_fc"]:
        states = rms_norm(states, states.shape[-1:], weights["input_norm.weight"], EPS)
    if flags(layout)["fc_norm"]:
        parts = states.chunk(3, -1)
        normed = [
            rms_norm(p, p.shape[-1:], weights[f"fc_norm.{i}.weight"], EPS)
            for i, p in enumerate(parts)
        ]
        states = torch.cat(normed, -1)
    return linear(states, weights["fc.weight"])
