"""Creates, trains, saves and opens any drafter of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.baselines.chains import ANYHOW, ChainTraining
from benchmarks.baselines.config import KINDS, BaselineConfig, Kind, read_config
from benchmarks.baselines.eagle import PUBLIC_LOSS, Eagle, EagleTraining
from benchmarks.baselines.eagle3 import Anyhow, Eagle3, TappedTarget
from benchmarks.baselines.features import FeatureBaseline
from benchmarks.baselines.layers import BaselineModel, parameter_count
from moa.bundle import Bundle
from moa.config import MODEL_TYPE, TargetFacts
from moa.errors import ConfigError
from moa.graph.load import LoadedGraph
from moa.model.checkpoint import load_drafter, load_weights, save_drafter, save_weights
from moa.model.drafter import Drafter
from moa.model.drafting import Drafting, MoaDrafting
from moa.model.features import FeatureDrafting
from moa.model.graph_drafting import GraphDrafting
from moa.model.loading import load_model
from moa.model.shared import SharedWeights
from moa.model.target import Target
from moa.training.distill import Distillation, DistillSettings
from moa.training.teacher import Teacher

_MODELS: dict[Kind, type[BaselineModel]] = {"eagle2": Eagle, "eagle3": Eagle3, "anyhow": Anyhow}


def new_baseline(config: BaselineConfig, target: PreTrainedModel) -> BaselineModel:
    """An untrained baseline beside its target."""
    model = _MODELS[config.kind](config, SharedWeights.of(target))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(device=target.device)


def matched(size: Callable[[int], int], parameters: int, what: str) -> int:
    """The width of feed-forwards at which a drafter whose size grows by it has about so many parameters."""
    per_unit = size(2) - size(1)
    width = round((parameters - size(1)) / per_unit) + 1
    if width < 1:
        raise ConfigError(f"{what} has more than {parameters} parameters without any MLP")
    return width


def baseline_size(config: BaselineConfig) -> int:
    """Parameters on the device of a baseline of this shape."""
    nothing = torch.empty(0)
    with torch.device("meta"):
        return parameter_count(_MODELS[config.kind](config, SharedWeights(nothing, nothing)), device_only=True)


def training_task(
    model: Drafter | BaselineModel, teacher: Teacher, settings: DistillSettings | None, seed: int
) -> Distillation:
    """A drafter's training objective; without settings, its authors' recipe."""
    if isinstance(model, Eagle):
        return EagleTraining(model, teacher, settings or PUBLIC_LOSS, seed)
    if isinstance(model, Anyhow):
        return ChainTraining(model, teacher, settings or DistillSettings(), seed, ANYHOW)
    if isinstance(model, Eagle3):
        return ChainTraining(model, teacher, settings or DistillSettings(), seed)
    if isinstance(model, Drafter):
        return Distillation(model, teacher, settings or DistillSettings(), seed)
    raise TypeError(f"no training is known for {type(model).__name__}")


def save(model: Drafter | BaselineModel, folder: Path) -> None:
    """Write config and weights."""
    if isinstance(model, BaselineModel):
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder)
        model.config.write(folder)
        return
    save_drafter(model, folder)


def load_baseline(folder: Path, target: PreTrainedModel, facts: TargetFacts) -> BaselineModel:
    """A trained baseline beside its target."""
    model = new_baseline(BaselineConfig.read(folder, facts), target)
    load_weights(model, folder)
    return model.to(dtype=target.dtype).eval()


def load_independent(folder: Path, target_source: str | Path) -> tuple[Drafter, TargetFacts]:
    """An independent drafter by itself, with the target's embedding and head."""
    loaded = load_model(target_source)
    model = load_drafter(folder, loaded.model, loaded.facts)
    if model.config.use_ca or model.config.body is not None:
        raise ConfigError(f"{folder} reads the target's records: only an independent drafter can answer alone")
    return model, loaded.facts


def load_target(
    source: str | Path, *, slots: int, capacity: int, drafter: Path | None = None, device: str = "cpu"
) -> Target:
    """The target, with taps if the drafter needs them."""
    if drafter is None or not reads_taps(drafter):
        return Target.load(source, slots=slots, capacity=capacity, device=device)
    target = TappedTarget.load(source, slots=slots, capacity=capacity, device=device)
    target.tap(BaselineConfig.read(drafter, target.facts).taps)
    return target


def reads_taps(drafter: Path) -> bool:
    """Whether this drafter reads states of the target's layers, which a target must be told to keep."""
    return bool(read_config(drafter).get("model_type") == "eagle3")


def open_drafting(folder: Path, target: Target, *, graph: str = "", threads: int = 0) -> Drafting:
    """Any drafter's folder, for the engine; by the graph of a bundle of it, on so many threads, if there is one."""
    if graph:
        drafter = load_drafter(folder, target.model, target.facts)
        return GraphDrafting(drafter, LoadedGraph.load(Bundle.open(graph), threads=threads), slots=target.pool.slots)
    kind, beside = read_config(folder).get("model_type"), (target.model, target.facts)
    if kind == MODEL_TYPE:
        model: Drafter | BaselineModel = load_drafter(folder, *beside)
    elif kind in KINDS:
        model = load_baseline(folder, *beside)
    else:
        raise ConfigError(f"{folder}: model_type {kind!r} is neither a MoA drafter's nor a baseline's")
    return drafting_with(model, slots=target.pool.slots, capacity=target.pool.capacity)


def load_any(folder: Path, target: PreTrainedModel, facts: TargetFacts) -> Drafter | BaselineModel:
    """A drafter of any kind."""
    if read_config(folder).get("model_type") == MODEL_TYPE:
        return load_drafter(folder, target, facts)
    return load_baseline(folder, target, facts)


def drafting_with(model: Drafter | BaselineModel, *, slots: int, capacity: int) -> Drafting:
    """Any drafter in memory, for the engine."""
    if isinstance(model, FeatureBaseline):
        return FeatureDrafting(model, slots=slots, capacity=capacity)
    if isinstance(model, Drafter):
        return MoaDrafting(model, slots=slots, capacity=capacity)
    raise TypeError(f"no drafting is known for {type(model).__name__}")
