"""Every drafter that is compared, by name: baselines, the MoA drafter, and its ablations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from benchmarks.baselines.config import BaselineConfig, Kind
from benchmarks.baselines.eagle import PUBLIC_LOSS
from benchmarks.baselines.layers import BaselineModel, parameter_count
from benchmarks.baselines.registry import matched_intermediate, new_baseline, training_task
from moa.config import DrafterConfig, TargetFacts
from moa.errors import ConfigError, UsageError
from moa.model.checkpoint import new_drafter
from moa.model.drafter import Drafter
from moa.training.distill import PAPER, Distillation, DistillSettings
from moa.training.masks import AnchorRule, Spacing
from moa.training.teacher import Teacher


@dataclass(frozen=True)
class Preset:
    """What sets a run apart: the kind of drafter, changes to its shape, and what it is trained on."""

    says: str
    kind: Kind | None = None
    """None: a MoA drafter."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the MoA drafter's config, or `layers` of a baseline."""
    distill: DistillSettings | None = None
    """None: the default of the kind."""


def _spaced(*spacings: Spacing) -> DistillSettings:
    return DistillSettings(anchors=AnchorRule(spacings=spacings))


PRESETS: dict[str, Preset] = {
    "moa0": Preset("MoA, TLI = 0"),
    "moa1": Preset("MoA, TLI = 1", shape={"tli": 1}),
    "moa3": Preset("MoA, TLI = 3", shape={"tli": 3}),
    "eagle2": Preset("EAGLE-2, public recipe: smooth-L1 + 0.1 KL", kind="eagle2"),
    "eagle2-kl": Preset("EAGLE-2, KL alone", kind="eagle2", distill=DistillSettings()),
    "eagle2-kl-feature": Preset(
        "EAGLE-2, KL + smooth-L1", kind="eagle2", distill=replace(PUBLIC_LOSS, loss_weight=1.0)
    ),
    "eagle3": Preset("EAGLE-3, 4 steps of training-time test", kind="eagle3"),
    "independent": Preset("independent, 1 layer, KL", kind="independent"),
    "independent-2": Preset("independent, 2 layers, KL", kind="independent", shape={"layers": 2}),
    # What the drafter is made of.
    "moa0-final-state": Preset("with the target's final state", shape={"final_state": True}),
    "moa0-no-final-state": Preset("without the target's final state", shape={"final_state": False}),
    "moa0-no-lsa": Preset("without LSA: the final state in its place", shape={"use_lsa": False, "final_state": True}),
    "moa0-no-ca": Preset("without CA", shape={"use_ca": False}),
    # What it is trained on.
    "moa0-paper": Preset("the paper's loss, staircase and anchors that see themselves", distill=PAPER),
    "moa0-feature": Preset("0.1 KL + smooth-L1", distill=DistillSettings(loss_weight=0.1, feature_weight=1.0)),
    "moa0-kl-feature": Preset("KL + smooth-L1", distill=DistillSettings(feature_weight=1.0)),
    "moa0-ce": Preset("cross-entropy with the target's choice", distill=DistillSettings(loss="ce")),
    "moa0-tv": Preset("total variation", distill=DistillSettings(loss="tv")),
    "moa0-staircase": Preset("with the staircase", distill=DistillSettings(staircase=True)),
    "moa0-loose-anchors": Preset("anchors see themselves", distill=DistillSettings(anchors=AnchorRule(strict=False))),
    "moa0-spacing-1": Preset("an anchor at every token: never behind", distill=_spaced(Spacing(1, 1, 1.0))),
    "moa0-spacing-2-8": Preset("anchors every 2-8 tokens", distill=_spaced(Spacing(2, 8, 1.0))),
    "moa0-spacing-6-14": Preset("anchors every 6-14 tokens (the paper's)", distill=_spaced(Spacing(6, 14, 1.0))),
    "moa0-spacing-32-64": Preset("anchors every 32-64 tokens", distill=_spaced(Spacing(32, 64, 1.0))),
    "moa0-spacing-mixed": Preset(
        "60 % 6-14, 20 % 32-64, the rest only the prompt", distill=_spaced(Spacing(6, 14, 0.6), Spacing(32, 64, 0.2))
    ),
    "moa0-lag-decay": Preset(
        "a position d past the newest activation weighs 0.9 ** (d - 1)", distill=DistillSettings(lag_decay=0.9)
    ),
}


def preset(name: str) -> Preset:
    """By name, or one clear line."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset {name!r}", hint=f"there are {', '.join(PRESETS)}") from None


def moa_config(facts: TargetFacts, changes: Mapping[str, Any]) -> DrafterConfig:
    """The embedded drafter's proportions: feed-forwards twice as wide as their layer, half as many KV heads as heads,
    every head in LSA a KV head as in the paper's recipe."""
    base = DrafterConfig.for_target(facts)
    heads = base.num_attention_heads
    proportions: dict[str, Any] = {
        f"{part}_num_key_value_heads": max(1, heads // 2) for part in ("self_attention", "cross_attention")
    }
    proportions |= {
        f"{part}_intermediate_size": 2 * facts.hidden_size for part in ("self_attention", "cross_attention")
    }
    proportions |= {"layer_self_attention_num_key_value_heads": heads}
    proportions |= {"layer_self_attention_intermediate_size": 2 * base.kv_hidden_size}
    return DrafterConfig.for_target(facts, **proportions | dict(changes))


def build(
    name: str,
    target: PreTrainedModel,
    facts: TargetFacts,
    shape: Mapping[str, Any],
    distill: Mapping[str, Any],
    seed: int,
) -> tuple[Drafter | BaselineModel, Distillation]:
    """A preset's untrained drafter and its task. `shape` and `distill` change the MoA drafter's settings in every
    preset that leaves them alone; baselines are as large as the MoA drafter of TLI = 0 that comes of it."""
    chosen = preset(name)
    teacher = Teacher(target)
    if chosen.kind is None:
        drafter = new_drafter(moa_config(facts, {**shape, **chosen.shape}), target)
        return drafter, Distillation(drafter, teacher, _changed(chosen.distill, distill), seed)
    like = moa_config(facts, {**shape, "tli": 0})
    size = parameter_count(new_drafter(like, target))
    heads, kv_heads = like.num_attention_heads, like.self_attention_num_key_value_heads
    layers = int(chosen.shape.get("layers", 1))
    width = matched_intermediate(chosen.kind, size, facts, heads=heads, kv_heads=kv_heads, layers=layers)
    config = BaselineConfig.for_target(
        chosen.kind, facts, intermediate_size=width, heads=heads, kv_heads=kv_heads, layers=layers
    )
    model = new_baseline(config, target)
    return model, training_task(model, teacher, chosen.distill, seed)


def _changed(settings: DistillSettings | None, changes: Mapping[str, Any]) -> DistillSettings:
    """The preset's own settings are what it is about, so changes go to the fields that it left at their default."""
    settings, default = settings or DistillSettings(), DistillSettings()
    try:
        free = {name: value for name, value in changes.items() if getattr(settings, name) == getattr(default, name)}
    except AttributeError as error:
        raise ConfigError(f"distill settings: {error}") from None
    return replace(settings, **free)
