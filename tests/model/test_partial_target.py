"""Partial reading gives the drafter the same tensors as loading the target, and reads nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa.config import DrafterConfig
from moa.errors import UsageError
from moa.model.checkpoint import load_drafter, new_drafter, save_drafter
from moa.model.loading import load_model
from moa.model.partial_target import read_partial_target
from tests.tiny import FAMILIES, save_tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("borrowed", [0, 2])
def test_the_drafter_of_a_streamed_target_is_that_of_a_loaded_one(family: str, borrowed: int, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "target")
    whole = load_model(folder)
    torch.manual_seed(1)
    save_drafter(new_drafter(DrafterConfig.for_target(whole.facts, tli=borrowed), whole.model), tmp_path / "drafter")
    part = read_partial_target(folder, borrowed=borrowed)
    assert part.facts.weights_id == whole.facts.weights_id
    assert part.facts.eos_ids == whole.facts.eos_ids

    ids, positions = torch.tensor([[5, 9, 17]]), torch.tensor([[4, 5, 6]])
    mask = torch.zeros(1, 1, 3, 7).masked_fill(torch.ones(3, 7).triu(5).bool(), -1e9)
    answers = []
    for model, facts in ((whole.model, whole.facts), (part.model, part.facts)):
        drafter = load_drafter(tmp_path / "drafter", model, facts)
        generator = torch.Generator().manual_seed(2)
        shapes = [(drafter.config.self_attention_num_key_value_heads, drafter.config.head_dim)]
        shapes += [(facts.kv_heads, facts.head_dim)] * borrowed
        past = [
            (torch.randn(1, h, 4, d, generator=generator), torch.randn(1, h, 4, d, generator=generator))
            for h, d in shapes
        ]
        records = torch.randn(
            2, 1, drafter.config.cross_attention_num_key_value_heads, 3, drafter.config.head_dim, generator=generator
        )
        with torch.inference_mode():
            hidden, _ = drafter.features(ids, positions, mask, past, records[0], records[1], torch.zeros(1, 1, 1, 3))
            answers.append(drafter.logits(hidden))
    torch.testing.assert_close(answers[1], answers[0])


def test_layers_that_are_not_borrowed_are_never_read(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if ".layers.0." not in name}, folder / "model.safetensors"
    )
    part = read_partial_target(folder, borrowed=1)
    assert (
        sum(parameter.numel() for parameter in part.model.parameters()) < sum(v.numel() for v in weights.values()) / 2
    )
    with pytest.raises(UsageError, match=r"lack \d+ tensors, model.layers.0"):
        read_partial_target(folder, borrowed=4)


def test_more_layers_than_there_are_cannot_be_borrowed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot borrow 5 layers of a target that has 4"):
        read_partial_target(save_tiny("llama", tmp_path / "target"), borrowed=5)
