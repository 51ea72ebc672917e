"""Partial reading gives the drafter the same tensors as loading the target, and reads nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import load_attention, new_attention
from moa.errors import UsageError
from moa.model.checkpoint import save_drafter
from moa.target.loading import load_model, read_partial_target
from testing.tiny import FAMILIES, save_tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("borrowed", [0, 2])
def test_the_drafter_of_a_streamed_target_is_that_of_a_loaded_one(
    family: str, borrowed: int, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "target")
    whole = load_model(folder)
    torch.manual_seed(1)
    save_drafter(
        new_attention(AttentionConfig.for_target(whole.facts, tli=borrowed), whole.model),
        tmp_path / "drafter",
    )
    part = read_partial_target(folder, borrowed=borrowed)
    assert part.facts.weights_id == whole.facts.weights_id
    assert part.facts.eos_ids == whole.facts.eos_ids
    ours, theirs = (
        load_attention(tmp_path / "drafter", one.model, one.facts) for one in (part, whole)
    )
    for name in ("embedding", "head", "embedding_scale", "logit_softcap"):
        torch.testing.assert_close(
            getattr(ours.shared, name), getattr(theirs.shared, name), rtol=0, atol=0
        )
    if borrowed:
        assert ours.borrowed is not None
        assert theirs.borrowed is not None
        torch.testing.assert_close(
            ours.borrowed.state_dict(), theirs.borrowed.state_dict(), rtol=0, atol=0
        )
        x = torch.randn(1, 3, whole.facts.hidden_size)
        positions = torch.tensor([[4, 5, 6]])
        past = [(torch.randn(1, whole.facts.kv_heads, 4, whole.facts.head_dim),) * 2] * borrowed
        found, wanted = (
            one.borrowed(x, positions, torch.zeros(1, 1, 3, 7), past)[0] for one in (ours, theirs)
        )
        torch.testing.assert_close(found, wanted)


def test_layers_that_are_not_borrowed_are_never_read(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.0." not in name}
    save_file(kept, folder / "model.safetensors")
    part = read_partial_target(folder, borrowed=1)
    assert part.model.num_parameters() < sum(v.numel() for v in weights.values()) / 2
    with pytest.raises(UsageError, match=r"lack \d+ tensors, model.layers.0"):
        read_partial_target(folder, borrowed=4)
    with pytest.raises(UsageError, match="cannot borrow 5 layers of a target that has 4"):
        read_partial_target(folder, borrowed=5)


def test_the_library_has_nothing_to_say_of_a_target_that_is_read_in_part(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "target")
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(listener)
    try:
        read_partial_target(folder)
    finally:
        logger.removeHandler(listener)
    assert said == []
