"""Which architectures can be a target, their relevant settings, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from moa.config import TargetFacts
from moa.errors import UnsupportedModelError

PER_LAYER_TYPE = (
    "gemma2",
    "gemma3_text",
    "qwen2",
    "qwen3",
)  # take a dict of masks, one for each kind of layer
ONE_MASK = ("llama", "mistral", "mixtral", "qwen3_moe")
FAMILIES = tuple(sorted(PER_LAYER_TYPE + ONE_MASK))

_RECURRENT = "its linear or recurrent layers keep one running state, which cannot branch into a tree of drafts"
_CHUNKED = (
    "its chunked attention depends on where a token stands in a chunk, which a tree does not keep"
)
_SHARED = (
    "some of its layers share another layer's keys and values, so a slot does not hold all layers"
)
_LATENT = "its multi-head latent attention caches a compressed state instead of keys and values"
_SINKS = "its attention has learned sinks, which tree attention does not compute"
_MULTIMODAL = "it takes more than text; use the text-only checkpoint"
_ENCODER = "it is an encoder-decoder, and a target is a decoder alone"
_ROPE = (
    "its rotary frequencies change with the longest row of a batch, so batched results would differ"
)
_BIDIRECTIONAL = "its attention is bidirectional, and a target generates left to right"

_REASON_BY_LAYER_TYPE = {
    "chunked_attention": _CHUNKED,
    "full_attention": None,
    "sliding_attention": None,
}
_REASON_BY_SETTING = {
    "is_encoder_decoder": _ENCODER,
    "vision_config": _MULTIMODAL,
    "audio_config": _MULTIMODAL,
    "attention_chunk_size": _CHUNKED,
    "num_kv_shared_layers": _SHARED,
    "kv_lora_rank": _LATENT,
    "linear_num_key_heads": _RECURRENT,
    "linear_attn_config": _RECURRENT,
    "mamba_d_state": _RECURRENT,
    "ssm_state_size": _RECURRENT,
    "state_size": _RECURRENT,
    "lru_width": _RECURRENT,
    "use_bidirectional_attention": _BIDIRECTIONAL,
}
_REASON_BY_FAMILY = {  # whose config files may leave this setting to the library's default
    "gemma3n_text": _SHARED,
    "gpt_oss": _SINKS,
    "lfm2": _RECURRENT,
    "llama4_text": _CHUNKED,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
}
_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")  # su: the name of longrope in older files


@dataclass(frozen=True)
class MaskPlan:
    """The sliding windows (None: no window) of a model's kinds of layer, and how it takes its
    masks."""

    windows: dict[str, int | None]
    per_layer_type: bool


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` unless a model of this `config.json` can be a target."""
    family = str(config.get("model_type") or "of no model_type")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModelError("config.json says layer_types that are no list of names")
    reasons = [reason for setting, reason in _REASON_BY_SETTING.items() if config.get(setting)]
    reasons += [_REASON_BY_LAYER_TYPE.get(kind, _RECURRENT) or "" for kind in kinds]
    reasons += [_REASON_BY_FAMILY.get(family, "")]
    reasons += [_ROPE for kind in _rope_types(config) if kind in _BATCH_DEPENDENT_ROPE]
    if reason := next(filter(None, reasons), None):
        raise UnsupportedModelError(f"{family} cannot be a target: {reason}")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{family} is not a family that tree verification was checked with",
            hint=f"supported: {', '.join(FAMILIES)}",
        )
    _check_numbers(config)


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse dimensions that no model has, before anything divides by them."""
    for name in _DIMENSIONS:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UnsupportedModelError(f"config.json says {name}: {str(value)[:40]!r}")


def mask_plan(config: PretrainedConfig) -> MaskPlan:
    """How to mask this model."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in PER_LAYER_TYPE:
        kinds = sorted(set(config.layer_types))
        return MaskPlan(
            {kind: window if kind == "sliding_attention" else None for kind in kinds}, True
        )
    # These models use a sliding window in every layer or in none, and take one mask.
    return MaskPlan({"all": window if config.model_type != "llama" else None}, False)


def facts_of(config: PretrainedConfig, eos: int | list[int] | None) -> TargetFacts:
    """The dimensions of a supported model; `eos` comes from its generation settings."""
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return TargetFacts(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        rope_theta=_rope_theta(config),
        rms_norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tie_embeddings=bool(config.tie_word_embeddings),
        eos_ids=tuple(eos_ids),
        bos_id=config.bos_token_id,
    )


def embedding_scale(config: PretrainedConfig) -> float:
    """The factor of a token's embedding before the first layer."""
    return float(config.hidden_size**0.5) if config.model_type.startswith("gemma") else 1.0


def _rope_theta(config: PretrainedConfig) -> float:
    rope = getattr(
        config, "rope_parameters", None
    )  # transformers 5; per layer type where layers differ
    if rope is None:
        return float(config.rope_theta)
    return float(rope.get("full_attention", rope)["rope_theta"])


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    for setting in ("rope_scaling", "rope_parameters"):
        rope = config.get(setting) or {}
        for scope in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
            yield str(scope.get("rope_type") or scope.get("type"))
