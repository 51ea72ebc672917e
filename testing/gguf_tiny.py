"""The tiny models of `testing/tiny.py` as GGUF files, made on the spot: the same weights, so that what
`transformers` says is the truth for llama.cpp, too."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moa.errors import UsageError
from moa.llama.library import find
from moa.target.families import facts_of
from testing.tiny import BOS, EOS, PAD, UNK, tiny

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_NORMAL = 1
_CONTROL = 3


def need_llama() -> None:
    """Skip a test where llama.cpp, or what writes its files, is not installed."""
    pytest.importorskip("gguf")
    try:
        find()
    except UsageError as error:
        pytest.skip(str(error))


def save(model: PreTrainedModel, path: Path, *, kind: str = "F32", **metadata: Any) -> Path:
    """Write a model in float32 with a vocabulary of characters; `metadata` replaces entries."""
    import gguf

    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(facts_of(config, None).rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        local = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(local)
    _add_vocabulary(writer, config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(key, value)
    for name, weight in _tensors(model).items():
        writer.add_tensor(name, _stored(name, weight, kind), raw_dtype=_raw(name, weight, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(name: str, weight: np.ndarray, kind: str) -> str:
    """What a tensor is stored in. `Q4_K_M` is a mixture of types, as published files are."""
    if weight.ndim == 1:
        return "F32"
    if kind == "Q4_K_M":
        is_finer = any(part in name for part in ("token_embd", "output.", "attn_v", "ffn_down"))
        return "Q6_K" if is_finer else "Q4_K"
    return kind


def _raw(name: str, weight: np.ndarray, kind: str) -> Any:
    import gguf

    kind = _kind_of(name, weight, kind)
    return None if kind == "F32" else gguf.GGMLQuantizationType[kind]


def _stored(name: str, weight: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    kind = _kind_of(name, weight, kind)
    if kind == "F32":
        return weight
    if kind == "Q4_K":
        return _blocks_of_four_bits(weight)
    if kind == "Q6_K":
        return _blocks_of_six_bits(weight)
    return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])


_BLOCK = 256
"""Weights of a block of K-quants."""


def _blocks_of_four_bits(weight: np.ndarray) -> np.ndarray:
    """Q4_K, whose writer the package `gguf` does not have: simple, with one scale and one least
    value for all eight parts of a block."""
    blocks = weight.reshape(-1, _BLOCK).astype(np.float32)
    least = np.minimum(blocks.min(1, keepdims=True), 0.0)
    step = np.maximum(blocks.max(1, keepdims=True) - least, 1e-6) / 15
    codes = np.clip(np.round((blocks - least) / step), 0, 15).astype(np.uint8)
    factors = np.concatenate([step, -least], 1) / 32  # each part's factor is 32, of six bits
    packed = np.zeros((len(blocks), 12), np.uint8)
    packed[:, :8] = 32 | (32 >> 4) << 6  # of parts 0 to 3 whole, of 4 to 7 the upper two bits
    pairs = codes.reshape(-1, 4, 2, 32)
    halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    rows = np.concatenate([factors.astype(np.float16).view(np.uint8), packed, halves], 1)
    return rows.reshape(*weight.shape[:-1], -1)


def _blocks_of_six_bits(weight: np.ndarray) -> np.ndarray:
    """Q6_K, likewise: one scale for all sixteen parts of a block."""
    blocks = weight.reshape(-1, _BLOCK).astype(np.float32)
    step = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-6) / 31
    codes = np.clip(np.round(blocks / step) + 32, 0, 63).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)
    first, second, third, fourth = (quarters[:, :, part] for part in range(4))
    low = np.concatenate([first & 15 | (third & 15) << 4, second & 15 | (fourth & 15) << 4], 2)
    high = first >> 4 | (second >> 4) << 2 | (third >> 4) << 4 | (fourth >> 4) << 6
    parts = np.ones((len(blocks), 16), np.uint8)
    rows = np.concatenate(
        [
            low.reshape(-1, 128),
            high.reshape(-1, 64),
            parts,
            step.astype(np.float16).view(np.uint8),
        ],
        1,
    )
    return rows.reshape(*weight.shape[:-1], -1)


def _letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it is printable, else the next one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def _add_vocabulary(writer: Any, size: int) -> None:
    """A token for each printable character, as `testing.tiny.tiny_tokenizer` has it."""
    letters = _letters()
    pieces = ["<pad>", "<bos>", "<eos>", "<unk>"]
    pieces += [letters[ord(character)] for character in string.printable]
    pieces += [f"<extra_{i}>" for i in range(len(pieces), size)]
    pieces = pieces[:size]
    # A file without any merge is refused: this one is for two characters that nobody types.
    rare = letters[0x0B], letters[0x0C]
    pieces[-1] = "".join(rare)
    kinds = [_CONTROL] * 4 + [_NORMAL] * (size - 4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(rare)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(False)


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """By llama.cpp's names, as its converters change them."""
    config: Any = model.config
    gemma = config.model_type.startswith("gemma")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        path, _, kind = name.rpartition(".")
        if path.endswith(".mlp.experts"):
            number = path.split(".")[2]
            found |= _experts(f"blk.{number}.", kind, weight.detach().float())
            continue
        prefix = ""
        if path.startswith("model.layers."):
            _, _, number, path = path.split(".", 3)
            prefix = f"blk.{number}."
        value = weight.detach().float()
        if "norm" in path and gemma:
            value = value + 1.0  # gemma scales by (1 + weight)
        if ARCHITECTURES[config.model_type] == "llama" and path.endswith(("q_proj", "k_proj")):
            value = _interleaved(value, config.head_dim)
        found[f"{prefix}{names[path]}.{kind}"] = value.contiguous().numpy()
    return found


def _experts(prefix: str, kind: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """The library keeps a mixture's experts in two stacks, llama.cpp in three."""
    if kind == "down_proj":
        return {f"{prefix}ffn_down_exps.weight": weight.contiguous().numpy()}
    gate, up = weight.chunk(2, dim=1)
    return {
        f"{prefix}ffn_gate_exps.weight": gate.contiguous().numpy(),
        f"{prefix}ffn_up_exps.weight": up.contiguous().numpy(),
    }


def _interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Llama's rotation pairs neighbours in llama.cpp, and halves in `transformers`."""
    heads = weight.shape[0] // head_dim
    halves = weight.view(heads, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def save_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A file that has a vocabulary and no weights."""
    import gguf

    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def save_mamba(path: Path, *, layers: int = 2, width: int = 64, vocab_size: int = 128) -> Path:
    """A random recurrent model: it keeps a state, and no keys and values."""
    import gguf

    inner = 2 * width
    states = 16
    kernel = 4
    rank = 8
    draw = np.random.default_rng(0)

    def weight(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * draw.standard_normal(shape)).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, vocab_size)
    writer.add_tensor("token_embd.weight", weight(vocab_size, width, scale=1.0))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", weight(vocab_size, width, scale=1.0))
    for layer in range(layers):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(block + "ssm_in.weight", weight(2 * inner, width))
        writer.add_tensor(block + "ssm_conv1d.weight", weight(inner, kernel))
        writer.add_tensor(block + "ssm_conv1d.bias", weight(inner))
        writer.add_tensor(block + "ssm_x.weight", weight(rank + 2 * states, inner))
        writer.add_tensor(block + "ssm_dt.weight", weight(inner, rank))
        writer.add_tensor(block + "ssm_dt.bias", weight(inner))
        writer.add_tensor(block + "ssm_a", -np.abs(weight(inner, states)) - 0.1)
        writer.add_tensor(block + "ssm_d", weight(inner))
        writer.add_tensor(block + "ssm_out.weight", weight(width, inner))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_hybrid(path: Path, *, width: int = 64, vocab_size: int = 128) -> Path:
    """A random model of the family LFM2: every other layer keeps the last tokens of a convolution,
    the others keys and values."""
    import gguf

    heads = 4
    kv_heads = [0, 2, 0, 2]  # by layer; a convolution has none
    kernel = 3
    inner = 2 * width
    draw = np.random.default_rng(0)

    def weight(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * draw.standard_normal(shape)).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "lfm2")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_block_count(len(kv_heads))
    writer.add_shortconv_l_cache(kernel)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    _add_vocabulary(writer, vocab_size)
    writer.add_tensor("token_embd.weight", weight(vocab_size, width, scale=1.0))
    writer.add_tensor("token_embd_norm.weight", np.ones(width, np.float32))  # the last norm
    writer.add_tensor("output.weight", weight(vocab_size, width, scale=1.0))
    head_dim = width // heads
    for layer, kv in enumerate(kv_heads):
        block = f"blk.{layer}."
        writer.add_tensor(block + "attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(block + "ffn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(block + "ffn_gate.weight", weight(inner, width))
        writer.add_tensor(block + "ffn_up.weight", weight(inner, width))
        writer.add_tensor(block + "ffn_down.weight", weight(width, inner))
        if kv == 0:
            writer.add_tensor(block + "shortconv.conv.weight", weight(width, kernel))
            writer.add_tensor(block + "shortconv.in_proj.weight", weight(3 * width, width))
            writer.add_tensor(block + "shortconv.out_proj.weight", weight(width, width))
            continue
        writer.add_tensor(block + "attn_q_norm.weight", np.ones(head_dim, np.float32))
        writer.add_tensor(block + "attn_k_norm.weight", np.ones(head_dim, np.float32))
        writer.add_tensor(block + "attn_q.weight", weight(width, width))
        writer.add_tensor(block + "attn_k.weight", weight(kv * head_dim, width))
        writer.add_tensor(block + "attn_v.weight", weight(kv * head_dim, width))
        writer.add_tensor(block + "attn_output.weight", weight(width, width, scale=0.1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


RECURRENT: dict[str, Callable[[Path], Path]] = {"mamba": save_mamba, "lfm2": save_hybrid}
"""Families that keep a running state, in all layers or in some; `testing/tiny.py` has none of them."""


def save_family(family: str, path: Path) -> Path:
    """A tiny file of any family that is tried."""
    if family in RECURRENT:
        return RECURRENT[family](path)
    how = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}
    return save(tiny(family, **how), path)
