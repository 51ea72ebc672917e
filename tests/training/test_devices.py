"""Training, drafting and verification on a device of their own compute what they compute on the
CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.inherit import inherit
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter, new_attention
from moa.drafters.attention.training import PAPER, Distillation, DistillSettings
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.least_squares import solve
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import ChainSettings, ChainTraining
from moa.model.borrowed import BorrowedLayers, SharedWeights
from moa.model.checkpoint import backbone_of
from moa.sampling import SamplingSettings
from moa.target.loading import load_model
from moa.target.torch_target import Target
from moa.training.data import PackedRows
from moa.training.masks import AnchorRule
from moa.training.teacher import Teacher
from moa.tree import TreeShape
from testing.close import assert_rounded
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import tiny
from tests.stand_in import Elsewhere, moved, stand_in
from tests.training.test_distill import task

FLAVOURS: dict[str, tuple[DistillSettings, dict[str, Any]]] = {
    "paper": (PAPER, {}),
    "TLI": (DistillSettings(), {"tli": 2}),
    "deep": (DistillSettings(), {"layers": 3, "final_norm": True, "final_state": True}),
    "cold": (DistillSettings(anchors=AnchorRule((), cold=1.0)), {}),
}


def there(value: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(value, Elsewhere), "it is not on the device"
    return value.inner


def twin(drafter: AttentionDrafter, model: Any) -> AttentionDrafter:
    """The same drafter on the stand-in, beside a model there."""
    borrowed = (
        BorrowedLayers(backbone_of(model), drafter.config.tli) if drafter.config.tli else None
    )
    other = AttentionDrafter(drafter.config, SharedWeights.of(model), borrowed).to(
        drafter.weight.dtype
    )
    other.load_state_dict(drafter.state_dict())
    made: Any = moved(other)
    return made


def on_device(target: Path, like: Distillation) -> Distillation:
    """The same learner on the stand-in."""
    model: Any = moved(load_model(target).model)
    return Distillation(twin(like.module, model), Teacher(model), like.settings)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_training_computes_the_same_on_a_device_of_its_own(
    target: Path, rows: PackedRows, flavour: str
) -> None:
    settings, shape = FLAVOURS[flavour]
    batch = rows.batch(0, 0, 4)
    mine = task(target, settings, **shape)
    loss = mine.loss(batch, 0, 0.0)
    loss.total.backward()
    with stand_in():
        other = on_device(target, mine)
        found = other.loss(batch, 0, 0.0)
        found.total.backward()
    assert_rounded(there(found.total), loss.total)
    assert float(there(found.weight)) == float(loss.weight)
    same_of = dict(mine.module.named_parameters())
    for name, parameter in other.module.named_parameters():
        same = same_of[name]
        assert (parameter.grad is None) == (same.grad is None), name
        if same.grad is not None:
            assert_rounded(there(parameter.grad), same.grad)


def test_a_servers_drafter_starts_and_learns_on_a_device_of_its_own(
    target: Path, rows: PackedRows
) -> None:
    torch.manual_seed(0)
    loaded = load_model(target)
    batch = rows.batch(0, 0, 4)
    config = StateDrafterConfig.for_target(loaded.facts)

    def taught(model: Any, drafter: StateDrafter) -> torch.Tensor:
        chains = ChainTraining(drafter, Teacher(model), ChainSettings(length=3))
        solve(drafter, chains.teacher, rows)
        loss = chains.loss(batch, 0, 0.0).total
        loss.backward()
        return loss

    mine = StateDrafter.new(config, SharedWeights.of(loaded.model))
    begun = {name: value.clone() for name, value in mine.state_dict().items()}
    loss = taught(loaded.model, mine)
    with stand_in():
        model: Any = moved(load_model(target).model)
        other = StateDrafter(config, SharedWeights.of(model))
        other.load_state_dict(begun)
        found = taught(model, moved(other))  # type: ignore[arg-type]
    assert_rounded(there(found), loss)
    assert_rounded(there(other.layer.mlp.up_proj.weight.grad), mine.layer.mlp.up_proj.weight.grad)


def test_layers_are_inherited_on_a_device_of_its_own(target: Path, rows: PackedRows) -> None:
    shape = {
        "layers": 2,
        "self_attention_intermediate_size": 32,
        "self_attention_num_key_value_heads": 2,
    }
    batch = rows.batch(0, 0, 4)
    mine = task(target, **shape)
    with stand_in():
        other = on_device(target, mine)
        inherit(other.module, other.teacher, (0, 2), batch)
    inherit(mine.module, mine.teacher, (0, 2), batch)
    for parameter, same in zip(other.module.parameters(), mine.module.parameters(), strict=True):
        assert_rounded(there(parameter.data), same.detach())


@pytest.mark.parametrize(
    ("family", "shape", "dtype"),
    [
        ("gemma2", {"tli": 1}, torch.float32),
        ("llama", {"layers": 3, "final_norm": True}, torch.bfloat16),
    ],
)
def test_drafts_and_verification_on_a_device_of_its_own(
    family: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    """In the target's precision, masks included; in float32 the text is the same as on the CPU."""
    settings = GenerationSettings(
        max_new_tokens=12, sampling=SamplingSettings(), shape=TreeShape(2, 3, 6)
    )
    prompts = [[5, 9, 77, 30], [64, 12, 8, 40, 41, 42, 43, 44, 45, 46]]
    model: Any = tiny(family).to(dtype)
    place = Target.from_model(model, slots=2, capacity=64)
    torch.manual_seed(0)
    drafter = (
        new_attention(AttentionConfig.for_target(place.facts, **shape), model).to(dtype).eval()
    )
    wanted = Speculator(place, BodyDrafting(drafter, slots=2, capacity=64)).generate(
        prompts, settings
    )
    with stand_in():
        other: Any = moved(tiny(family).to(dtype))
        elsewhere = Target.from_model(other, slots=2, capacity=64)
        drafting = BodyDrafting(twin(drafter, other).eval(), slots=2, capacity=64)
        found = Speculator(elsewhere, drafting).generate(prompts, settings)
    assert [len(answer.ids) for answer in found] == [12, 12]
    if dtype == torch.float32:
        assert [answer.ids for answer in found] == [answer.ids for answer in wanted]
    assert isinstance(drafting.pool.k, Elsewhere)
    assert any(answer.drafted for answer in found)
