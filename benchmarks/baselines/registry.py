"""Creates, trains, saves and opens any drafter of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from benchmarks.baselines.eagle import PUBLIC_LOSS, Eagle, EagleConfig, EagleTraining
from benchmarks.baselines.eagle3 import eagle3_config, new_eagle3, save_eagle3
from moa.bundle import Bundle
from moa.config import TargetFacts, read_config
from moa.drafters.attention.model import AttentionDrafter, load_attention
from moa.drafters.attention.training import Distillation, DistillSettings
from moa.drafters.contract import Drafting
from moa.drafters.eagle3.config import Eagle3Config
from moa.drafters.eagle3.model import Eagle3Drafter
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.drafters.registry import find
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import ChainSettings, ChainTraining
from moa.errors import ConfigError
from moa.graph.load import LoadedGraph
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import filled, save_drafter, stored_weights
from moa.target.loading import load_model
from moa.target.torch_target import Target
from moa.training.losses import LossSettings, TeacherLike, TeacherObjective

Feature = Literal["eagle2", "eagle3", "states"]
FeatureDrafter = Eagle3Drafter | Eagle | StateDrafter
FeatureConfig = Eagle3Config | EagleConfig | StateDrafterConfig
BESIDE_TARGET = ("layer_self_attention.", "Ekv2E.", "final_state.", "tap_norms.", "fuse.")
"""Parts that run once a token, beside the target."""
_OF_EAGLE3 = ("fc.", "fc_norm.")


def parameter_count(module: nn.Module, *, device_only: bool = False) -> int:
    """Trainable parameters, of all parts or only of those that draft."""
    beside = _OF_EAGLE3 if isinstance(module, Eagle3Drafter) else BESIDE_TARGET
    return sum(
        p.numel()
        for name, p in module.named_parameters()
        if p.requires_grad and not (device_only and name.startswith(beside))
    )


def shape_for(
    kind: Feature, facts: TargetFacts, *, intermediate_size: int, heads: int, kv_heads: int
) -> FeatureConfig:
    """A drafter of features for a target; the heads are the drafter's own."""
    if kind == "eagle3":
        return eagle3_config(
            facts, intermediate_size=intermediate_size, heads=heads, kv_heads=kv_heads
        )
    config = EagleConfig if kind == "eagle2" else StateDrafterConfig
    shape = {
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return config.for_target(facts, **shape)


def new_baseline(config: FeatureConfig, shared: SharedWeights) -> FeatureDrafter:
    """An untrained drafter of features beside its target."""
    if isinstance(config, Eagle3Config):
        return new_eagle3(config, shared)
    if not isinstance(config, EagleConfig):
        return StateDrafter.new(config, shared)
    model = Eagle(config, shared)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(device=shared.head.device)


def matched(size: Callable[[int], int], parameters: int, what: str) -> int:
    """The width of feed-forwards at which a drafter whose size grows by it has about so many
    parameters."""
    per_unit = size(2) - size(1)
    width = round((parameters - size(1)) / per_unit) + 1
    if width < 1:
        raise ConfigError(f"{what} has more than {parameters} parameters without any MLP")
    return width


def training_task(
    model: AttentionDrafter | FeatureDrafter,
    teacher: TeacherLike,
    settings: LossSettings | None,
    seed: int,
) -> TeacherObjective:
    """A drafter's training objective; without settings, its authors' recipe."""
    if isinstance(model, Eagle3Drafter | StateDrafter):
        assert settings is None or isinstance(settings, ChainSettings)
        return ChainTraining(model, teacher, settings or ChainSettings(), seed)
    assert settings is None or isinstance(settings, DistillSettings)
    if isinstance(model, Eagle):
        return EagleTraining(model, teacher, settings or PUBLIC_LOSS, seed)
    if isinstance(model, AttentionDrafter):
        return Distillation(model, teacher, settings or DistillSettings(), seed)
    raise TypeError(f"no training is known for {type(model).__name__}")


def save(model: AttentionDrafter | FeatureDrafter, folder: Path) -> None:
    """Write config and weights."""
    if isinstance(model, Eagle3Drafter):
        save_eagle3(model, folder)
    else:
        save_drafter(model, folder)


def load_any(
    folder: Path, target: PreTrainedModel, facts: TargetFacts
) -> AttentionDrafter | FeatureDrafter:
    """A trained drafter of any kind beside its target."""
    values = read_config(folder, "drafter")
    if values.get("model_type") != EagleConfig.MODEL_TYPE:
        drafter: Any = find(folder).load(target, facts)
        return drafter
    config = EagleConfig.read(folder, facts)
    shared = SharedWeights.of(target)
    model = filled(lambda: Eagle(config, shared), stored_weights(folder), folder)
    return model.to(device=shared.head.device, dtype=target.dtype).eval()


def load_independent(
    folder: Path, target_source: str | Path
) -> tuple[AttentionDrafter, TargetFacts]:
    """An independent drafter by itself, with the target's embedding and head."""
    loaded = load_model(target_source)
    model = load_attention(folder, loaded.model, loaded.facts)
    if model.config.use_ca or model.config.body is not None:
        raise ConfigError(
            f"{folder} reads the target's records: only an independent drafter can answer alone"
        )
    return model, loaded.facts


def load_target(
    source: str | Path,
    *,
    slots: int,
    capacity: int,
    drafter: Path | None = None,
    device: str = "cpu",
) -> Target:
    """The target, with taps if the drafter needs them."""
    target = Target.load(source, slots=slots, capacity=capacity, device=device)
    if drafter is not None and (taps := taps_of(drafter, target.facts)):
        target.tap(taps)
    return target


def taps_of(drafter: Path, facts: TargetFacts) -> tuple[int, ...]:
    """The target's states that this drafter reads, which a target must be told to keep."""
    values = read_config(drafter, "drafter")
    if values.get("model_type") == EagleConfig.MODEL_TYPE:
        return ()
    return find(drafter).config(facts).taps


def open_drafting(folder: Path, target: Target, *, graph: str = "", threads: int = 0) -> Drafting:
    """Any drafter's folder, for the engine; by the graph of a bundle of it, on so many threads, if
    there is one."""
    if graph:
        drafter = find(folder).load(target.model, target.facts)
        return OnnxDrafting(
            drafter, LoadedGraph.load(Bundle.open(graph), threads=threads), slots=target.cache.slots
        )
    model = load_any(folder, target.model, target.facts)
    return drafting_with(model, slots=target.cache.slots, capacity=target.cache.capacity)


def drafting_with(
    model: AttentionDrafter | FeatureDrafter, *, slots: int, capacity: int
) -> Drafting:
    """Any drafter in memory, for the engine."""
    return model.drafting(slots=slots, capacity=capacity)
