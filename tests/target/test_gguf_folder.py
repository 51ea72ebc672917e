"""A GGUF file is read as the model that it was made of: config, weights, tokenizer and template; and
what cannot be read is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import StoredBlocks
from moa.gguf.weights import rows_of
from moa.target.gguf_folder import GgufModel, config_of
from moa.target.loading import load_model, load_tokenizer, locate, read_facts
from testing.gguf_file import write_gguf
from testing.tiny import tiny

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rounded(family: str, **shape: Any) -> PreTrainedModel:
    """A tiny model whose weights bfloat16 can hold; Gemma's norms too, after one is added."""
    model = tiny(family, **shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_((weight * 64).round() / 64)
            else:
                weight.copy_(weight.bfloat16().float())
    return model


def metadata(family: str, model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    arch = ARCHITECTURES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<bos>", "<eos>", "<mark>", *letters][: config.vocab_size]
    kinds = [3, 3, 3, 4, *[1] * (len(pieces) - 4)]
    found = {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(read_theta(config)),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    if family.startswith("gemma"):
        found[f"{arch}.attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        found[f"{arch}.attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        found[f"{arch}.final_logit_softcapping"] = float(config.final_logit_softcapping)
    return found


def read_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None)
    return config.rope_theta if rope is None else rope.get("full_attention", rope)["rope_theta"]


def tensors(family: str, model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    """As llama.cpp's converter writes them."""
    gemma = family.startswith("gemma")
    found = {}
    for name, weight in model.named_parameters():
        value = weight.detach().numpy()
        part, _, leaf = name.rpartition(".")
        if part in _OUTER:
            theirs = _OUTER[part]
        else:
            _, _, layer, rest = part.split(".", 3)
            theirs = f"blk.{layer}.{(_GEMMA if gemma else _LAYER)[rest]}"
        if gemma and "norm" in name:
            value = value + 1
        if family == "llama" and part.endswith(("q_proj", "k_proj")):
            kind = "num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"
            heads = getattr(model.config, kind)
            rows = value.reshape(heads, 2, value.shape[0] // heads // 2, -1)
            value = rows.swapaxes(1, 2).reshape(value.shape)
        found[f"{theirs}.{leaf}"] = value
    return found


def written(family: str, model: PreTrainedModel, path: Path) -> Path:
    return write_gguf(path, metadata(family, model), tensors(family, model))


def shape_of(family: str) -> dict[str, Any]:
    """Layers as the family's files have them: Gemma 3's sixth sees everything."""
    if family != "gemma3":
        return {"vocab_size": 260} | ({"query_pre_attn_scalar": 16} if family == "gemma2" else {})
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return {
        "vocab_size": 260,
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "query_pre_attn_scalar": 16,
    }


@pytest.mark.parametrize("family", ARCHITECTURES)
@torch.no_grad()
def test_a_file_is_the_model_that_it_was_made_of(family: str, tmp_path: Path) -> None:
    model = rounded(family, **shape_of(family))
    loaded = load_model(written(family, model, tmp_path / "model.gguf"))
    theirs = dict(loaded.model.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, theirs[name]), name
    ids = torch.arange(4, 40)[None]
    model.set_attn_implementation("eager")
    loaded.model.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, loaded.model(ids).logits)
    assert loaded.facts.eos_ids == (2, 3)
    assert loaded.facts.tie_embeddings == family.startswith("gemma")
    tokenizer = load_tokenizer(loaded.folder)
    assert tokenizer.chat_template == TEMPLATE
    text = "int main() { return 0; } \u00e9\u4e2d\U0001f600 <mark><eos>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids("<mark>") in tokenizer.encode(text)


def test_facts_need_no_weights_and_a_folder_is_made_once(tmp_path: Path) -> None:
    file = written("qwen2", rounded("qwen2", vocab_size=260), tmp_path / "model.gguf")
    facts, folder = read_facts(str(file))
    assert not (folder / "model.safetensors").exists()
    said: list[str] = []
    assert locate(str(file), say=said.append) == folder
    assert "unpacking model.gguf once" in said[0]
    assert load_model(file).facts.weights_id == facts.weights_id
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert locate(str(file), say=said.append) == folder
    assert sum("unpacking model.gguf once" in line for line in said) == 1
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    other = rounded("qwen2", vocab_size=260, seed=1)
    assert locate(written("qwen2", other, tmp_path / "model.gguf")) != folder


def test_it_says_how_far_the_unpacking_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa.target.gguf_folder._TELL_SECONDS", 0.0)
    file = written("qwen2", rounded("qwen2"), tmp_path / "model.gguf")
    said: list[str] = []
    locate(str(file), say=said.append)
    shares = [
        int(found[1])
        for line in said[1:]
        if (found := re.fullmatch(r"unpacking model\.gguf: (\d+)%, about \d+ s left", line))
    ]
    assert len(shares) == len(said) - 1 > 5
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] <= 100


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = rounded("qwen2", vocab_size=260)
    every = tensors("qwen2", model)
    names = list(every)
    meta = metadata("qwen2", model)
    for number, part in enumerate((names[:5], names[5:20], names[20:]), 1):
        write_gguf(
            tmp_path / f"m-{number:05}-of-00003.gguf",
            meta if number == 1 else {"general.architecture": "qwen2"},
            {name: every[name] for name in part},
        )
    loaded = load_model(tmp_path / "m-00002-of-00003.gguf")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(loaded.model.named_parameters())[name])
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(UsageError, match="1 of 3 shards are missing"):
        load_model(tmp_path / "m-00001-of-00003.gguf")


def test_llama_3_s_rotation_is_known_by_its_table(tmp_path: Path) -> None:
    model = rounded("llama", vocab_size=260)
    turns = np.arange(0, 16, 2) / 16
    wavelengths = 2 * np.pi * 500_000.0**turns
    smooth = ((8192 / wavelengths - 1) / 3).clip(0, 1)
    table = 1 / ((1 - smooth) / 32 + smooth)
    meta = metadata("llama", model) | {"llama.rope.freq_base": 500_000.0}
    every = tensors("llama", model) | {"rope_freqs.weight": table}
    config = config_of(GgufModel.read(write_gguf(tmp_path / "m.gguf", meta, every)))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == 32
    every["rope_freqs.weight"] = table + 0.5
    with pytest.raises(UnsupportedModelError, match="table of rotations"):
        config_of(GgufModel.read(write_gguf(tmp_path / "m.gguf", meta, every)))


def cut(meta: dict[str, Any], every: dict[str, Any]) -> None:
    del every["blk.1.ffn_up.weight"]


def foreign(meta: dict[str, Any], every: dict[str, Any]) -> None:
    meta["general.architecture"] = "mamba"


def unnamed(meta: dict[str, Any], every: dict[str, Any]) -> None:
    every["blk.0.ssm_in.weight"] = np.zeros((4, 4), np.float32)


def no_heads(meta: dict[str, Any], every: dict[str, Any]) -> None:
    meta["qwen2.attention.head_count"] = 0


def wide(meta: dict[str, Any], every: dict[str, Any]) -> None:
    meta["qwen2.embedding_length"] = 1 << 20


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, "lack 1 tensors"),
        (foreign, "'mamba' are not read"),
        (unnamed, "ssm_in.weight has no place"),
        (no_heads, "0 heads"),
        (wide, r"embed_tokens.weight is \[260, \d+\], and its config asks for \[260, 1048576\]"),
    ],
)
def test_other_files_are_refused_in_one_line(
    spoil: Callable[[dict[str, Any], dict[str, Any]], None], says: str, tmp_path: Path
) -> None:
    model = rounded("qwen2", vocab_size=260)
    meta, every = metadata("qwen2", model), tensors("qwen2", model)
    spoil(meta, every)
    with pytest.raises(UsageError, match=says) as refused:
        load_model(write_gguf(tmp_path / "m.gguf", meta, every))
    assert "\n" not in str(refused.value)


def test_an_unknown_way_of_storing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="stored as IQ2_XS"):
        list(rows_of(tmp_path, StoredBlocks("x", "IQ2_XS", (256, 1), 0, 74)))


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
def test_numbers_are_what_gguf_s_own_package_reads(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf import quants

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 60, (9, size * 3), dtype=np.uint8)
    raw.tofile(tmp_path / "data")
    stored = StoredBlocks("x", kind, (block * 3, 9), 0, raw.size)
    (found,) = rows_of(tmp_path / "data", stored)
    wanted = quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found, wanted)
