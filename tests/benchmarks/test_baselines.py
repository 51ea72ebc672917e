"""Every baseline under the engine: the text stays the target's, the size is as asked, a folder is
the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baselines.presets import NO_RECORDS, build, moa_config
from benchmarks.baselines.registry import (
    drafting_with,
    load_any,
    load_target,
    open_drafting,
    parameter_count,
    save,
)
from moa.drafters.attention.model import new_attention
from moa.errors import ConfigError, UsageError
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import save_tiny
from tests.benchmarks.pairs import (
    KINDS,
    OPPONENTS,
    WIDE,
    baseline,
    opponent,
    prompts,
    target_for,
    tiny_target,
)


@pytest.mark.parametrize("kind", OPPONENTS)
@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=5)], ids=["T0", "T1"]
)
def test_text_does_not_depend_on_the_drafter(kind: str, sampling: SamplingSettings) -> None:
    target = target_for(kind, tiny_target())
    drafting = drafting_with(
        opponent(kind, target), slots=target.cache.slots, capacity=target.cache.capacity
    )
    asked = prompts(1, 2, 17, 30)
    plain = Speculator(target).generate(
        asked, GenerationSettings(max_new_tokens=24, shape=None, sampling=sampling)
    )
    for shape in (TreeShape.chain(4), TreeShape(breadth=4, depth=3, nodes=12)):
        settings = GenerationSettings(max_new_tokens=24, shape=shape, sampling=sampling)
        found = Speculator(target, drafting).generate(asked, settings)
        assert [g.ids for g in found] == [g.ids for g in plain]
        assert all(g.drafted for g in found)


@pytest.mark.parametrize("kind", OPPONENTS)
def test_all_are_as_large_on_the_device_as_the_moa_drafter(kind: str) -> None:
    target = target_for(kind, tiny_target())
    wanted = parameter_count(
        new_attention(moa_config(target.facts, WIDE), target.model), device_only=True
    )
    model, _ = build(kind, target.model, target.facts, WIDE, {}, 0)
    assert parameter_count(model, device_only=True) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("kind", [*OPPONENTS, "moa"])
def test_a_folder_is_the_model(kind: str, tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "target")
    target = target_for(kind, load_target(source, slots=1, capacity=64).model, slots=1, capacity=64)
    model = (
        new_attention(moa_config(target.facts, {}), target.model)
        if kind == "moa"
        else opponent(kind, target)
    )
    save(model, tmp_path / "drafter")
    target = load_target(source, slots=1, capacity=64, drafter=tmp_path / "drafter")
    drafting: Any = open_drafting(tmp_path / "drafter", target)
    again = drafting.model if kind in KINDS else drafting.drafter
    assert type(again) is type(model)
    if kind != "eagle3":
        assert again.config == model.config
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    target = target_for("eagle2", tiny_target())
    save(baseline("eagle2", target), tmp_path)
    other = save_tiny("llama", tmp_path / "other", num_hidden_layers=3)
    loaded = load_target(other, slots=1, capacity=64)
    with pytest.raises(
        ConfigError, match="made for another target: width, vocabulary and layers are"
    ):
        load_any(tmp_path, loaded.model, loaded.facts)
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        open_drafting(tmp_path / "nothing", loaded)


def test_a_size_too_small_is_refused() -> None:
    target = target_for("eagle2", tiny_target())
    small = {**NO_RECORDS, "layers": 1, "self_attention_intermediate_size": 1}
    with pytest.raises(ConfigError, match=r"eagle3 has more than .* parameters without any MLP"):
        build("eagle3", target.model, target.facts, small, {}, 0)
