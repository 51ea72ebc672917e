"""Every drafter that is compared, by name: baselines, the MoA drafter, and its ablations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.baselines.eagle import PUBLIC_LOSS
from benchmarks.baselines.registry import (
    Feature,
    FeatureDrafter,
    matched,
    new_baseline,
    parameter_count,
    shape_for,
    training_task,
)
from demo.inherit import CALIBRATION_ROWS, inherit
from demo.recipe import ALONE
from moa.config import TargetFacts
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter, load_attention, new_attention
from moa.drafters.attention.training import PAPER, DistillSettings
from moa.drafters.states.least_squares import solve
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import ChainSettings
from moa.errors import ConfigError, UsageError
from moa.model.borrowed import SharedWeights
from moa.training.data import PackedRows
from moa.training.losses import LossSettings, TeacherLike, TeacherObjective
from moa.training.masks import AnchorRule, Spacing
from moa.training.teacher import Teacher


@dataclass(frozen=True)
class Preset:
    """A run's preset: the kind of drafter, changes to its shape, and its training settings."""

    says: str
    kind: Feature | Literal["moa", "independent"] = "moa"
    """A body with records, the same without them, or a baseline that is no such body."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the config of a body."""
    distill: LossSettings | None = None
    """None: the default of the kind."""


def _spaced(*spacings: Spacing) -> DistillSettings:
    return DistillSettings(anchors=AnchorRule(spacings=spacings))


NO_RECORDS: Mapping[str, Any] = {"use_ca": False, "use_lsa": False, "final_state": False}
"""The shape of a body alone."""


PRESETS: dict[str, Preset] = {
    # Trained like the embedded drafter, for all uses: current records, late ones, and none.
    "moa0": Preset("MoA, TLI = 0", distill=ALONE),
    "moa1": Preset("MoA, TLI = 1", shape={"tli": 1, "final_norm": False}, distill=ALONE),
    "moa3": Preset("MoA, TLI = 3", shape={"tli": 3, "final_norm": False}, distill=ALONE),
    "eagle2": Preset("EAGLE-2, public recipe: smooth-L1 + 0.1 KL", kind="eagle2"),
    "eagle2-kl": Preset("EAGLE-2, KL alone", kind="eagle2", distill=DistillSettings()),
    "eagle2-kl-feature": Preset(
        "EAGLE-2, KL + smooth-L1", kind="eagle2", distill=replace(PUBLIC_LOSS, loss_weight=1.0)
    ),
    "eagle3": Preset(
        "EAGLE-3.1, its authors' weights of later tokens",
        kind="eagle3",
        distill=ChainSettings(decay=0.8, late=7, absent=0.0),
    ),
    "eagle3-even": Preset(
        "EAGLE-3.1, all tokens of a chain alike",
        kind="eagle3",
        distill=ChainSettings(late=7, absent=0.0),
    ),
    "states": Preset("what moa-train makes", kind="states"),
    "states-in-step": Preset(
        "the same for newest states alone", kind="states", distill=ChainSettings(late=7, absent=0.0)
    ),
    "independent": Preset("independent: the body without records, KL", kind="independent"),
    # What the drafter is made of.
    "moa0-final-state": Preset("with the target's final state", shape={"final_state": True}),
    "moa0-no-final-state": Preset("without the target's final state", shape={"final_state": False}),
    "moa0-no-lsa": Preset(
        "without LSA: the final state in its place", shape={"use_lsa": False, "final_state": True}
    ),
    "moa0-no-ca": Preset("without CA", shape={"use_ca": False}),
    # What it is trained on.
    "moa0-paper": Preset(
        "the paper's loss, staircase and anchors that see themselves", distill=PAPER
    ),
    "moa0-feature": Preset(
        "0.1 KL + smooth-L1", distill=DistillSettings(loss_weight=0.1, feature_weight=1.0)
    ),
    "moa0-kl-feature": Preset("KL + smooth-L1", distill=DistillSettings(feature_weight=1.0)),
    "moa0-staircase": Preset("with the staircase", distill=DistillSettings(staircase=True)),
    "moa0-loose-anchors": Preset(
        "anchors see themselves", distill=DistillSettings(anchors=AnchorRule(strict=False))
    ),
    "moa0-spacing-1": Preset(
        "an anchor at every token: never behind", distill=_spaced(Spacing(1, 1, 1.0))
    ),
    "moa0-spacing-2-8": Preset("anchors every 2-8 tokens", distill=_spaced(Spacing(2, 8, 1.0))),
    "moa0-spacing-6-14": Preset(
        "anchors every 6-14 tokens (the paper's)", distill=_spaced(Spacing(6, 14, 1.0))
    ),
    "moa0-spacing-32-64": Preset(
        "anchors every 32-64 tokens", distill=_spaced(Spacing(32, 64, 1.0))
    ),
    "moa0-spacing-mixed": Preset(
        "60 % 6-14, 20 % 32-64, the rest only the prompt",
        distill=_spaced(Spacing(6, 14, 0.6), Spacing(32, 64, 0.2)),
    ),
}


def preset(name: str) -> Preset:
    """A preset by name, or a one-line error."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"no preset {name!r}", hint=f"there are {', '.join(PRESETS)}") from None


def moa_config(facts: TargetFacts, changes: Mapping[str, Any]) -> AttentionConfig:
    """The embedded drafter's proportions: four narrow layers, and cross-attention with next to no
    feed-forward."""
    proportions: dict[str, Any] = {
        "layers": 4,
        "self_attention_intermediate_size": facts.hidden_size // 2,
        "cross_attention_intermediate_size": facts.hidden_size // 8,
        "layer_self_attention_intermediate_size": facts.kv_heads * facts.head_dim,
        "final_norm": True,
        "final_state": True,
    }
    return AttentionConfig.for_target(facts, **proportions | dict(changes))


def build(
    name: str,
    target: PreTrainedModel,
    facts: TargetFacts,
    shape: Mapping[str, Any],
    distill: Mapping[str, Any],
    seed: int,
    *,
    start: Sequence[int] = (),
    init: Path | None = None,
    data: PackedRows | None = None,
    teacher: TeacherLike | None = None,
) -> tuple[AttentionDrafter | FeatureDrafter, TeacherObjective]:
    """A preset's drafter and its task. `shape` changes the MoA drafter's settings, `distill` those
    of both kinds of ours, in every preset that leaves them alone; all others have as many
    parameters on the device as the MoA drafter of TLI = 0 that comes of it. A body starts as the
    layers `start` of the target's, measured on `data`. With `init`, a MoA drafter goes on from that
    trained one, in its shape. The `teacher` is the target, unless another is given."""
    chosen = preset(name)
    if start:
        shape = {**shape, "layers": len(start), "scaled_embedding": True}
    like = moa_config(facts, {**shape, "tli": 0})
    size = parameter_count(new_attention(like, target), device_only=True)
    teacher = teacher or Teacher(target)
    settings = chosen.distill
    ours = {"moa": DistillSettings, "states": ChainSettings}
    if chosen.kind in ours:
        settings = _changed(settings or ours[chosen.kind](), distill)
    if chosen.kind != "moa" and chosen.kind != "independent":
        model = _of_features(chosen.kind, like, size, target, facts)
        task = training_task(model, teacher, settings, seed)
        if isinstance(model, StateDrafter) and data is not None:
            solve(model, teacher, data)
        return model, task
    if chosen.kind == "moa":
        drafter = _moa(init, {**shape, **chosen.shape}, target, facts)
    else:
        drafter = _without_records(facts, shape, size, target)
    if start:
        if data is None:
            raise UsageError(
                "a body that starts from the target's layers needs data to measure their units on"
            )
        inherit(drafter, Teacher(target), start, data.batch(0, 0, CALIBRATION_ROWS))
    return drafter, training_task(drafter, teacher, settings, seed)


def _moa(
    init: Path | None, shape: Mapping[str, Any], target: PreTrainedModel, facts: TargetFacts
) -> AttentionDrafter:
    """A new MoA drafter, or a trained one."""
    if init is None:
        return new_attention(moa_config(facts, shape), target)
    return load_attention(init, target, facts, torch.float32).train()


def _of_features(
    kind: Feature, like: AttentionConfig, size: int, target: PreTrainedModel, facts: TargetFacts
) -> FeatureDrafter:
    """A drafter of features with the heads of the drafter that it is compared with, and as large."""
    heads = like.num_attention_heads
    kv_heads = like.self_attention_num_key_value_heads

    def made(width: int, shared: SharedWeights) -> FeatureDrafter:
        return new_baseline(
            shape_for(kind, facts, intermediate_size=width, heads=heads, kv_heads=kv_heads), shared
        )

    def count(width: int) -> int:
        nothing = torch.empty(0, device="meta")
        with torch.device("meta"):
            return parameter_count(made(width, SharedWeights(nothing, nothing)), device_only=True)

    return made(matched(count, size, kind), SharedWeights.of(target))


def _without_records(
    facts: TargetFacts, shape: Mapping[str, Any], size: int, target: PreTrainedModel
) -> AttentionDrafter:
    """A body alone, wider in its feed-forwards by what cross-attention would have been."""

    def config(width: int) -> AttentionConfig:
        return moa_config(facts, {**shape, **NO_RECORDS, "self_attention_intermediate_size": width})

    def count(width: int) -> int:
        nothing = torch.empty(0)
        with torch.device("meta"):
            return parameter_count(AttentionDrafter(config(width), SharedWeights(nothing, nothing)))

    return new_attention(config(matched(count, size, "a body without records")), target)


def _changed(settings: LossSettings, changes: Mapping[str, Any]) -> LossSettings:
    """Changes apply only to fields that the preset does not set."""
    default = type(settings)()
    try:
        free = {
            name: value
            for name, value in changes.items()
            if getattr(settings, name) == getattr(default, name)
        }
    except AttributeError as error:
        raise ConfigError(f"distill settings: {error}") from None
    return replace(settings, **free)
