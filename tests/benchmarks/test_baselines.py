"""Every baseline under the engine: the text stays the target's, the size is as asked, a folder is the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.baselines.config import KINDS, BaselineConfig, Kind
from benchmarks.baselines.layers import parameter_count
from benchmarks.baselines.presets import moa_config
from benchmarks.baselines.registry import (
    baseline_drafting,
    load_baseline,
    load_target,
    matched_intermediate,
    new_baseline,
    open_drafting,
    save_baseline,
)
from moa.errors import ConfigError, UsageError
from moa.model.checkpoint import new_drafter, save_drafter
from moa.sampling import SamplingSettings
from moa.speculate import GenerationSettings, Speculator
from moa.tree import TreeShape
from tests.benchmarks.pairs import baseline, prompts, target_for, tiny_target
from tests.tiny import save_tiny


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=5)], ids=["T0", "T1"])
def test_text_does_not_depend_on_the_drafter(kind: Kind, sampling: SamplingSettings) -> None:
    target = target_for(kind, tiny_target())
    model = baseline(kind, target, **({"layers": 2} if kind == "independent" else {}))
    drafting = baseline_drafting(model, slots=target.pool.slots, capacity=target.pool.capacity)
    asked = prompts(1, 2, 17, 30)
    plain = Speculator(target).generate(asked, GenerationSettings(max_new_tokens=24, shape=None, sampling=sampling))
    for shape in (TreeShape.chain(4), TreeShape(breadth=4, depth=3, nodes=12)):
        settings = GenerationSettings(max_new_tokens=24, shape=shape, sampling=sampling, adapt=False)
        found = Speculator(target, drafting).generate(asked, settings)
        assert [g.ids for g in found] == [g.ids for g in plain]
        assert all(g.drafted for g in found)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_match_the_moa_drafter(kind: Kind) -> None:
    target = target_for(kind, tiny_target())
    # At the tiny width MoA is smaller than the smallest EAGLE-3, so it is given wide feed-forwards.
    wide = {"self_attention_intermediate_size": 256, "cross_attention_intermediate_size": 256}
    wanted = parameter_count(new_drafter(moa_config(target.facts, wide), target.model))
    width = matched_intermediate(kind, wanted, target.facts, heads=4, kv_heads=2)
    config = BaselineConfig.for_target(kind, target.facts, intermediate_size=width, heads=4, kv_heads=2)
    assert parameter_count(new_baseline(config, target.model)) == pytest.approx(wanted, rel=0.02)


def test_a_size_too_small_is_refused() -> None:
    target = target_for("eagle2", tiny_target())
    with pytest.raises(ConfigError, match="without any MLP"):
        matched_intermediate("eagle2", 1000, target.facts, heads=4, kv_heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_the_model(kind: Kind, tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "target")
    target = load_target(source, slots=1, capacity=64)
    model = baseline(kind, target)
    save_baseline(model, tmp_path / "drafter")
    again = load_baseline(tmp_path / "drafter", target.model, target.facts)
    assert again.config == model.config
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))
    target = load_target(source, slots=1, capacity=64, drafter=tmp_path / "drafter")
    speculator = Speculator(target, open_drafting(tmp_path / "drafter", target))
    settings = GenerationSettings(max_new_tokens=8, shape=TreeShape.chain(3), adapt=False)
    plain = Speculator(target).generate(prompts(5), GenerationSettings(max_new_tokens=8, shape=None))
    assert speculator.generate(prompts(5), settings)[0].ids == plain[0].ids


def test_a_moa_folder_opens_alike(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "target")
    target = load_target(source, slots=1, capacity=64)
    save_drafter(new_drafter(moa_config(target.facts, {}), target.model), tmp_path / "moa")
    target = load_target(source, slots=1, capacity=64, drafter=tmp_path / "moa")
    settings = GenerationSettings(max_new_tokens=8, shape=TreeShape.chain(3), adapt=False)
    assert Speculator(target, open_drafting(tmp_path / "moa", target)).generate(prompts(5), settings)[0].drafted


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    target = target_for("independent", tiny_target())
    save_baseline(baseline("independent", target), tmp_path)
    other = save_tiny("llama", tmp_path / "other", num_hidden_layers=3)
    loaded = load_target(other, slots=1, capacity=64)
    with pytest.raises(ConfigError, match="target_layers is 4, the target's is 3"):
        load_baseline(tmp_path, loaded.model, loaded.facts)
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        open_drafting(tmp_path / "nothing", loaded)
