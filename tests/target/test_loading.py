"""Loading: every supported family loads, and everything else is refused in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moa.errors import UnsupportedModelError, UsageError
from moa.target.families import refuse_unsupported
from moa.target.identity import tokenizer_hash, weights_id
from moa.target.loading import load_model, load_tokenizer, locate
from moa.target.torch_target import Row, Target
from testing.tiny import EOS, FAMILIES, save_tiny, tiny, tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path | str, **how: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_model(folder, **how)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value.line()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_its_facts(family: str, tmp_path: Path) -> None:
    loaded = load_model(save_tiny(family, tmp_path / "model"))
    facts = loaded.facts
    assert facts.family in (family, f"{family}_text")
    assert (facts.layers, facts.hidden_size, facts.vocab_size) == (4, 64, 128)
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (4, 2, 16)
    assert facts.rope_theta == (1_000_000.0 if family == "gemma3" else 10_000.0)
    assert facts.max_positions == 512
    assert facts.tie_embeddings == family.startswith("gemma")
    assert facts.eos_ids == (EOS,)
    assert len(facts.tokenizer_hash) == 64
    assert len(facts.weights_id) == len("v2-") + 64
    here = tiny(family)
    there = dict(loaded.model.named_parameters())
    assert all(torch.equal(weight, there[name]) for name, weight in here.named_parameters())
    assert not any(weight.requires_grad for weight in there.values())


def test_the_dtype_is_the_one_asked_for(folder: Path) -> None:
    target = Target.load(folder, dtype=torch.bfloat16, capacity=16)
    assert target.dtype == target.cache.k.dtype == torch.bfloat16
    target.forward([Row(target.cache.acquire(), [5], [-1])])


def test_all_end_tokens_of_the_generation_settings_count_and_a_model_in_memory_is_checked_too(
    folder: Path,
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_model(folder).facts.eos_ids == (2, 9)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        Target.from_model(tiny("gpt2"))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "running state"),
        ("rwkv", "running state"),
        ("recurrent_gemma", "running state"),
        ("jamba", "running state"),
        ("llama4_text", "chunked attention"),
        ("gemma3n_text", "share another layer"),
        ("deepseek_v3", "latent attention"),
        ("t5", "encoder-decoder"),
        ("gemma3", "more than text"),
    ],
)
def test_what_cannot_branch_is_refused_by_name_and_reason(family: str, reason: str) -> None:
    # With all defaults spelled out, as the library would, it must name the true reason.
    with pytest.raises(UnsupportedModelError, match=family) as caught:
        refuse_unsupported(AutoConfig.for_model(family).to_dict())
    assert reason in caught.value.line()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "running state"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked attention"),
        ({"num_kv_shared_layers": 2}, "share another layer"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "longest row"),
        ({"rope_scaling": {"type": "longrope"}}, "longest row"),
        ({"rope_scaling": {"type": "su"}}, "longest row"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "longest row"),
        (
            {"model_type": "somebody_elses", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "somebody_elses is no family that is known here",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_on_load(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert reason in caught.value.line()


def test_scaled_rope_that_is_the_same_for_every_row_is_fine() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    }
    refuse_unsupported(tiny_config("llama", rope_scaling=scaling).to_dict())


def test_an_id_that_the_hub_cannot_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "no model nobody/nothing: not a folder here" in refusal("nobody/nothing")


def test_a_file_is_no_model(folder: Path) -> None:
    assert "it is neither a folder nor a GGUF file" in refusal(str(folder / "config.json"))
    for place in (folder / "nowhere", "./nowhere/at/all"):
        assert "there is no such file or folder" in refusal(place)
    assert locate(str(folder)) == folder
    assert "cannot use device 'toaster'" in refusal(folder, device="toaster")


DAMAGED = "is not a safetensors file, or is damaged"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "cannot read"),
        ("config.json", b"[" * 10**5, "cannot read"),
        ("config.json", b"\xff", "cannot read"),
        ("config.json", b"[]", "no JSON object"),
        ("model.safetensors", None, "model.safetensors is missing (pickled weights"),
        ("model.safetensors", b"", DAMAGED),
        ("model.safetensors", b"\xff" * 64, DAMAGED),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", DAMAGED),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{?", DAMAGED),
        ("tokenizer.json", b"{", "is not a tokenizer"),
        ("tokenizer.json", b"[]", "is not a tokenizer"),
        ("tokenizer.json", b'{"model": ' + b"[" * 10**5, "is not a tokenizer"),
    ],
)
def test_a_missing_or_damaged_file_is_named(
    folder: Path, file: str, content: bytes | None, said: str
) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    assert said in refusal(folder)


def test_weights_that_are_cut_or_of_another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert "is cut short" in refusal(folder)
    path.write_bytes(whole)
    edit_config(folder, intermediate_size=80)
    assert "cannot load the model" in refusal(folder)
    edit_config(folder, intermediate_size=96)
    weights = load_file(path)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    assert "lack 1 tensors, model.layers.2.mlp.up_proj.weight among them" in refusal(folder)


def test_a_model_without_a_tokenizer_loads_and_says_so_when_asked(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    target = Target.load(folder, capacity=16)
    assert target.facts.tokenizer_hash == ""
    with pytest.raises(UsageError, match="no tokenizer in"):
        load_tokenizer(folder)


TEN_TIMES = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [TEN_TIMES] * 9}},
            "times as much text",
        ),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}}, "64 steps"),
        ({"pre_tokenizer": {"type": "Nothing"}}, "cannot load the tokenizer"),
    ],
)
def test_a_hostile_tokenizer_is_refused_before_a_library_reads_it(
    folder: Path, parts: dict[str, Any], said: str
) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    with pytest.raises(UsageError, match=said):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_huge_tokenizer_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.truncate(2**40)  # of holes
    with pytest.raises(UsageError, match="too large for a tokenizer"):
        load_tokenizer(folder)


def test_the_tokenizer_hash_sees_meaning_and_not_layout() -> None:
    base: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    }
    same = {
        "truncation": {"max_length": 9},
        "padding": None,
        "model": {"merges": ["a b"], "vocab": {"b": 1, "a": 0, "ab": 2}, "type": "BPE"},
    }
    other = {"model": base["model"] | {"vocab": {"a": 0, "b": 2, "ab": 1}}}
    assert tokenizer_hash(json.dumps(base)) == tokenizer_hash(json.dumps(same, indent=1).encode())
    assert tokenizer_hash(json.dumps(base)) != tokenizer_hash(json.dumps(other))


def test_a_model_in_several_files_has_the_same_id_until_its_weights_change(folder: Path) -> None:
    facts = load_model(folder).facts
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tiny("llama").save_pretrained(folder, max_shard_size="350KB")
    assert torch.equal(load_model(folder).model.lm_head.weight, tiny("llama").lm_head.weight)
    assert weights_id(folder, facts) == facts.weights_id
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 weight files are missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of weight files" in refusal(folder)
    weights["lm_head.weight"][0, 0] += 1.0
    save_file(weights, folder / "model.safetensors")
    assert weights_id(folder, facts) != facts.weights_id
