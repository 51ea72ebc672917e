"""The text of a quantized target, verified by trees, is the plain decoding of that same target."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest
import torch

from moa.errors import ConfigError, UsageError
from moa.target.torch_target import Target
from testing.tiny import save_tiny
from tests.verifier.kit import decoded, generate, prompt

ROOM = {"slots": 4, "capacity": 96}


def same_as_plain(target: Target) -> None:
    rng = random.Random(0)
    for seed in range(3):
        ids = prompt(seed, 9 + 5 * seed)
        truth = generate(target.model, ids, 24)
        assert decoded(target, ids, truth, rng) == truth


@pytest.mark.parametrize("packed", [True, False])
def test_a_target_in_int8_is_exact_by_its_own_plain_decoding(packed: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    folder = save_tiny("llama", tmp_path / "model")
    target = Target.load(folder, quantize="int8", packed=packed, pack_weights=True, **ROOM)
    up = target.model.get_decoder().layers[0].mlp.up_proj.weight
    assert type(up.data) is not torch.Tensor, "the matrices are quantized"
    same_as_plain(target)


def test_what_is_quantized_and_cannot_be_run_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    with pytest.raises(UsageError, match="quantized already"):
        Target.load(folder, quantize="int8", **ROOM)
    with pytest.raises(ConfigError, match="unknown quantization"):
        Target.load(folder, quantize="int3", **ROOM)
    with pytest.raises(UsageError, match="cannot load the model") as caught:
        Target.load(folder, **ROOM)
    assert "\n" not in str(caught.value)


def test_cudnns_attention_is_off_wherever_a_cuda_device_is_asked_for(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with (
        contextlib.nullcontext()
        if torch.cuda.is_available()
        else pytest.raises(UsageError, match="cannot use dev")
    ):
        Target.load(save_tiny("llama", tmp_path), device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
