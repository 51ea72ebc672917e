"""Quantized, offloaded, compressed: the text of a tree-verified target is the plain decoding of that same target."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from moa.errors import ConfigError, UsageError
from moa.model.placement import Placement
from moa.model.target import Target
from tests.tiny import save_tiny
from tests.verifier.kit import decoded, generate, prompt

ROOM = {"slots": 4, "capacity": 96}


def same_as_plain(target: Target) -> None:
    rng = random.Random(0)
    for seed in range(3):
        ids = prompt(seed, 9 + 5 * seed)
        truth = generate(target.model, ids, 24)
        assert decoded(target, ids, truth, rng) == truth


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_an_offloaded_target_says_what_the_whole_one_says(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = save_tiny(family, tmp_path / "model")
    placement = Placement(resident_layers=1, offload_folder=tmp_path / "disk")
    offloaded, whole = Target.load(folder, placement=placement, **ROOM), Target.load(folder, **ROOM)
    layers = offloaded.model.get_decoder().layers
    on_disk = [any(weight.is_meta for weight in layer.parameters()) for layer in layers]
    assert on_disk == [False, True, True, True]
    ids = prompt(1, 12)
    truth = generate(whole.model, ids, 20)
    assert decoded(offloaded, ids, truth, random.Random(1)) == truth
    assert decoded(whole, ids, truth, random.Random(1)) == truth


@pytest.mark.parametrize("packed", [True, False])
def test_a_target_in_int8_is_exact_by_its_own_plain_decoding(packed: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    folder = save_tiny("llama", tmp_path / "model")
    target = Target.load(folder, placement=Placement(quantize="int8"), packed=packed, pack_weights=True, **ROOM)
    up = target.model.get_decoder().layers[0].mlp.up_proj.weight
    assert type(up.data) is not torch.Tensor, "the matrices are quantized"
    same_as_plain(target)


def test_what_is_quantized_and_cannot_be_run_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(UsageError, match="quantized already"):
        Target.load(folder, placement=Placement(quantize="int8"), **ROOM)
    with pytest.raises(UsageError, match="cannot load the model") as caught:
        Target.load(folder, **ROOM)
    assert "\n" not in str(caught.value)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown quantization"):
        Placement(quantize="int3")
    with pytest.raises(ConfigError, match="resident-layers"):
        Placement(offload_folder=tmp_path)
    with pytest.raises(ConfigError, match="choose one"):
        Placement(quantize="int8", resident_layers=1)
    folder = save_tiny("llama", tmp_path / "model")
    with pytest.raises(UsageError, match="disk"):
        Target.load(folder, placement=Placement(resident_layers=1), **ROOM)


def test_offloading_is_refused_where_it_hangs(tmp_path: Path) -> None:
    away = Placement(resident_layers=1, offload_folder=tmp_path / "disk")
    with pytest.raises(UsageError, match="does not work on cuda"):
        away.arguments(save_tiny("llama", tmp_path / "model"), {}, torch.device("cuda"))


def test_cudnns_attention_is_off_wherever_a_cuda_device_is_asked_for(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="cannot use device"):
            Target.load(save_tiny("llama", tmp_path), device="cuda")
    else:
        Target.load(save_tiny("llama", tmp_path), device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
