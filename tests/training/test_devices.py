"""Training, drafting and verification on a device of their own compute what they compute on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from demo.pretraining import Pretraining
from moa.config import DrafterConfig
from moa.model.borrowed import BorrowedLayers
from moa.model.checkpoint import backbone_of, new_drafter
from moa.model.drafter import Drafter
from moa.model.drafting import MoaDrafting
from moa.model.generate import GenerationSettings, Speculator
from moa.model.loading import LoadedModel, load_model
from moa.model.shared import SharedWeights
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.training.data import PackedRows
from moa.training.distill import PAPER, Distillation, DistillSettings
from moa.training.inherit import inherit
from moa.training.masks import AnchorRule
from moa.training.teacher import Teacher
from moa.tree import TreeShape
from tests.close import assert_rounded
from tests.stand_in import DEVICE, Elsewhere, moved, stand_in
from tests.tiny import tiny

FLAVOURS: dict[str, tuple[DistillSettings, dict[str, Any]]] = {
    "plain": (DistillSettings(), {}),
    "paper": (PAPER, {}),
    "TLI": (DistillSettings(), {"tli": 2}),
    "final state": (DistillSettings(), {"final_state": True}),
    "final norm": (DistillSettings(), {"final_norm": True}),
    "deep": (DistillSettings(), {"layers": 3}),
    "cold": (DistillSettings(anchors=AnchorRule((), cold=1.0)), {}),
    "no records": (DistillSettings(), {"use_ca": False}),
}


def there(value: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(value, Elsewhere), "it is not on the device"
    return value.inner


def learner(loaded: LoadedModel, settings: DistillSettings, shape: dict[str, Any]) -> Distillation:
    torch.manual_seed(0)
    drafter = new_drafter(DrafterConfig.for_target(loaded.facts, **shape), loaded.model)
    return Distillation(drafter, Teacher(loaded.model), settings)


def twin(drafter: Drafter, model: Any) -> Drafter:
    """The same drafter on the stand-in, beside a model there."""
    borrowed = BorrowedLayers(backbone_of(model), drafter.config.tli) if drafter.config.tli else None
    other = Drafter(drafter.config, SharedWeights.of(model), borrowed).to(drafter.weight.dtype)
    other.load_state_dict(drafter.state_dict())
    made: Any = moved(other)
    return made


def on_device(loaded: LoadedModel, like: Distillation) -> Distillation:
    """The same learner on the stand-in."""
    model: Any = moved(loaded.model)
    return Distillation(twin(like.module, model), Teacher(model), like.settings)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_training_computes_the_same_on_a_device_of_its_own(target: Path, rows: PackedRows, flavour: str) -> None:
    settings, shape = FLAVOURS[flavour]
    batch = rows.batch(0, 0, 4)
    mine, loaded = learner(load_model(target), settings, shape), load_model(target)
    loss = mine.loss(batch, 0, 0.0)
    loss.total.backward()
    with stand_in():
        other = on_device(loaded, mine)
        found = other.loss(batch, 0, 0.0)
        found.total.backward()
    assert_rounded(there(found.total), loss.total)
    assert float(there(found.weight)) == float(loss.weight)
    for (name, parameter), (_, same) in zip(
        other.module.named_parameters(), mine.module.named_parameters(), strict=True
    ):
        assert (parameter.grad is None) == (same.grad is None), name
        if same.grad is not None:
            assert_rounded(there(parameter.grad), same.grad)


def test_pretraining_computes_the_same_on_a_device_of_its_own(rows: PackedRows) -> None:
    batch = rows.batch(0, 0, 4)
    model, other = tiny("llama"), tiny("llama")
    loss = Pretraining(model).loss(batch, 0, 0.0)
    with stand_in():
        found = Pretraining(moved(other)).loss(batch, 0, 0.0)  # type: ignore[arg-type]
        found.total.backward()
    assert_rounded(there(found.total), loss.total)
    assert float(there(found.weight)) == float(loss.weight)


def test_layers_are_inherited_on_a_device_of_its_own(target: Path, rows: PackedRows) -> None:
    shape = {"layers": 2, "self_attention_intermediate_size": 32, "self_attention_num_key_value_heads": 2}
    batch, loaded = rows.batch(0, 0, 4), load_model(target)
    mine = learner(load_model(target), DistillSettings(), shape)
    with stand_in():
        other = on_device(loaded, mine)
        inherit(other.module, other.teacher, (0, 2), batch)
    inherit(mine.module, mine.teacher, (0, 2), batch)
    for parameter, same in zip(other.module.parameters(), mine.module.parameters(), strict=True):
        assert_rounded(there(parameter.data), same.detach())


@pytest.mark.parametrize(
    ("family", "shape", "dtype"),
    [
        ("llama", {}, torch.float32),
        ("llama", {"layers": 3}, torch.bfloat16),
        ("gemma2", {"tli": 1}, torch.float32),
        ("gemma2", {"final_norm": True}, torch.bfloat16),
    ],
)
def test_drafts_and_verification_on_a_device_of_its_own(family: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    """In the target's precision, masks included; in float32 the text is the same as on the CPU."""
    settings = GenerationSettings(max_new_tokens=12, sampling=SamplingSettings(), shape=TreeShape(2, 3, 6))
    prompts = [[5, 9, 77, 30], [64, 12, 8, 40, 41, 42, 43, 44, 45, 46]]
    model: Any = tiny(family).to(dtype)
    place = Target.from_model(model, slots=2, capacity=64)
    torch.manual_seed(0)
    drafter = new_drafter(DrafterConfig.for_target(place.facts, **shape), model).to(dtype).eval()
    wanted = Speculator(place, MoaDrafting(drafter, slots=2, capacity=64)).generate(prompts, settings)
    with stand_in():
        other: Any = moved(tiny(family).to(dtype))
        elsewhere = Target.from_model(other, slots=2, capacity=64)
        drafting = MoaDrafting(twin(drafter, other).eval(), slots=2, capacity=64)
        found = Speculator(elsewhere, drafting).generate(prompts, settings)
    assert [len(answer.ids) for answer in found] == [12, 12]
    if dtype == torch.float32:
        assert [answer.ids for answer in found] == [answer.ids for answer in wanted]
    assert isinstance(drafting.pool.k, Elsewhere)
    assert any(answer.drafted for answer in found)


def test_what_an_accelerator_refuses_is_refused() -> None:
    with stand_in():
        x = Elsewhere(torch.ones(2, 3))
        assert x.device.type == torch.zeros(1, device=DEVICE).device.type == DEVICE
        assert x.cpu().numpy().sum() == 6
        with pytest.raises(AssertionError, match="over two devices"):
            x + torch.ones(2, 3)
        with pytest.raises((TypeError, RuntimeError)):
            x.numpy()
        query, mask = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 2)
        with pytest.raises(AssertionError, match=r"a mask of torch.float32 for a query of torch.bfloat16"):
            functional.scaled_dot_product_attention(query, query, query, mask)
