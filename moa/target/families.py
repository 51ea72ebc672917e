"""Which architectures can be a target, what differs between them, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import Cache, PretrainedConfig

from moa.config import TargetFacts
from moa.errors import UnsupportedModelError, UsageError

Masks = Literal["one", "by kind"]
"""How a model takes its masks: one for all layers, or a dict with one for each kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs from Llama, beyond what the library's own layers do by themselves."""

    masks: Masks = "one"
    windowed: bool = True
    """Whether `sliding_window` of its config applies where there is one mask."""
    embedding: Literal["plain", "root of width", "multiplier"] = "plain"
    """How a token's embedding is scaled before the first layer."""
    chains_only: bool = False
    """Whether layers keep one running state, which a tree of drafts cannot branch."""
    understands: tuple[str, ...] = ()
    """Settings that are a reason to refuse any other model."""


_LLAMA = Family(windowed=False)
_MISTRAL = Family()
_BY_KIND = Family(masks="by kind")
_GEMMA = Family(masks="by kind", embedding="root of width")
_RECURRENT = Family(masks="by kind", chains_only=True, understands=("linear_num_key_heads",))

_FAMILIES: dict[str, Family] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    # Layers of two shapes; the last ones read the keys and values of an earlier one.
    "gemma4_text": replace(_GEMMA, understands=("num_kv_shared_layers",)),
    "glm4": _LLAMA,
    # Sinks in attention: `library.tree_attention` adds them.
    "gpt_oss": _BY_KIND,
    # The logits have a divisor, too: `logit_scale`.
    "granite": Family(windowed=False, embedding="multiplier"),
    "lfm2": _RECURRENT,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "olmo3": _BY_KIND,
    # Rotary frequencies of two kinds, for short and for long texts: `rope.settle`.
    "phi3": _MISTRAL,
    "qwen2": _BY_KIND,
    "qwen3": _BY_KIND,
    "qwen3_5_text": _RECURRENT,
    "qwen3_moe": _MISTRAL,
    "qwen3_next": _RECURRENT,
    # Every fourth layer is without positions, of which nothing outside of it takes notice.
    "smollm3": _BY_KIND,
}
FAMILIES = tuple(sorted(_FAMILIES))

RECURRENT_KINDS = ("conv", "linear_attention")
"""Kinds of layer that keep a running state instead of keys and values."""

_CHUNKED = (
    "its chunked attention depends on where a token stands in a chunk, which a tree does not keep"
)
_RUNNING_STATE = "its linear or recurrent layers keep a running state of a kind that is not known"
_SHARED = "some of its layers share another layer's keys and values in a way that is not known"
_LATENT = "its multi-head latent attention caches a compressed state instead of keys and values"
_MULTIMODAL = "it takes more than text; use the text-only checkpoint"
_ENCODER = "it is an encoder-decoder, and a target is a decoder alone"
_ROPE = (
    "its rotary frequencies change with the longest row of a batch, so batched results would differ"
)
_BIDIRECTIONAL = "its attention is bidirectional, and a target generates left to right"

_REASON_BY_SETTING = {
    "is_encoder_decoder": _ENCODER,
    "vision_config": _MULTIMODAL,
    "audio_config": _MULTIMODAL,
    "attention_chunk_size": _CHUNKED,
    "kv_lora_rank": _LATENT,
    "use_bidirectional_attention": _BIDIRECTIONAL,
    "num_kv_shared_layers": _SHARED,
    "linear_num_key_heads": _RUNNING_STATE,
    "linear_attn_config": _RUNNING_STATE,
    "mamba_d_state": _RUNNING_STATE,
    "ssm_state_size": _RUNNING_STATE,
    "state_size": _RUNNING_STATE,
    "lru_width": _RUNNING_STATE,
}
_REASON_BY_FAMILY = {  # whose config files may leave this setting to the library's default
    "gemma3n_text": _SHARED,
    "llama4_text": _CHUNKED,
    "recurrent_gemma": _RUNNING_STATE,
    "rwkv": _RUNNING_STATE,
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
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_BATCH_DEPENDENT_ROPE = ("dynamic",)
_ROPE_TO_SETTLE = ("longrope", "su")  # su: the name of longrope in older files
_SETTLED_ROPE = ("phi3",)
"""Families whose frequencies are settled by the longest text that a target serves."""


@dataclass(frozen=True)
class MaskPlan:
    """The sliding windows (None: no window) of a model's kinds of layer, and how it takes its
    masks."""

    windows: dict[str, int | None]
    per_layer_type: bool


@dataclass(frozen=True)
class Scaling:
    """What a model multiplies its embeddings and its logits with, and bends these to."""

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` unless a model of this `config.json` can be a target."""
    family = str(config.get("model_type") or "of no model_type")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModelError("config.json says layer_types that are no list of names")
    if reason := next(_reasons(config, family), None):
        raise UnsupportedModelError(f"{family} cannot be a target: {reason}")
    _check_numbers(config)


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse dimensions that no model has, before anything divides by them."""
    for name in _DIMENSIONS:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UnsupportedModelError(f"config.json says {name}: {str(value)[:40]!r}")


def _reasons(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Why a model of this config cannot be a target."""
    known = _FAMILIES.get(family, Family())
    for setting, reason in _REASON_BY_SETTING.items():
        value = config.get(setting)
        # "vision": pictures see each other, a text is read from left to right.
        if value and value != "vision" and setting not in known.understands:
            yield reason
    for kind in config.get("layer_types") or ():
        if kind in _ATTENTION_KINDS or (known.chains_only and kind in RECURRENT_KINDS):
            continue
        yield _CHUNKED if kind == "chunked_attention" else _RUNNING_STATE
    if family in _REASON_BY_FAMILY:
        yield _REASON_BY_FAMILY[family]
    for kind in _rope_types(config):
        if kind in _BATCH_DEPENDENT_ROPE or (
            kind in _ROPE_TO_SETTLE and family not in _SETTLED_ROPE
        ):
            yield _ROPE
    if known.chains_only and not hasattr(Cache, "get_recurrent_state"):
        yield "its running states need transformers 5"
    if family == "gemma4_text" and config.get("num_kv_shared_layers") == config.get(
        "num_hidden_layers"
    ):
        yield "all of its layers read another model's keys and values"


def _family(name: str) -> Family:
    """What differs in a family; nothing in a plain model of another one (`plain.py`)."""
    return _FAMILIES.get(name, _LLAMA)


def mask_plan(config: PretrainedConfig) -> MaskPlan:
    """How to mask this model."""
    family = _family(config.model_type)
    window = getattr(config, "sliding_window", None)
    if family.masks == "by kind":
        kinds = sorted(set(config.layer_types))
        return MaskPlan(
            {kind: window if kind == "sliding_attention" else None for kind in kinds}, True
        )
    # These models use a sliding window in every layer or in none, and take one mask.
    return MaskPlan({"all": window if family.windowed else None}, False)


def chains_only(config: PretrainedConfig) -> bool:
    """Whether layers keep one running state, so that drafts cannot branch."""
    return _family(config.model_type).chains_only


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """Layers that keep a running state instead of keys and values."""
    kinds = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_KINDS]


def cached_layers(config: PretrainedConfig) -> dict[int, tuple[int, int]]:
    """Layers that keep keys and values of their own, and their KV heads and head width. Others keep
    a running state, or read the rows of an earlier layer."""
    without = set(recurrent_layers(config))
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    own = getattr(config, "per_layer_config", None) or {}
    shapes = {}
    for layer in range(count):
        if layer not in without:
            shapes[layer] = _cache_shape(own[layer] if own else config)
    return shapes


def _cache_shape(config: Any) -> tuple[int, int]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_key_value_heads), int(width)


def facts_of(config: PretrainedConfig, eos: int | list[int] | None) -> TargetFacts:
    """The dimensions of a supported model; `eos` comes from its generation settings."""
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    shapes = cached_layers(config)
    kv_heads, head_dim = next(iter(shapes.values()))
    return TargetFacts(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(config),
        rms_norm_eps=_norm_eps(config),
        max_positions=config.max_position_embeddings,
        tie_embeddings=bool(config.tie_word_embeddings),
        eos_ids=tuple(eos_ids),
        bos_id=config.bos_token_id,
        uniform_cache=list(shapes.values()) == [(kv_heads, head_dim)] * config.num_hidden_layers,
    )


def _norm_eps(config: PretrainedConfig) -> float:
    names = ("norm_eps", "rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    return next((float(getattr(config, name)) for name in names if hasattr(config, name)), 0.0)


def running_states(config: PretrainedConfig) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Layers that keep running states which an exported graph can carry, and the states' shapes."""
    shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in recurrent_layers(config):
        if config.layer_types[layer] == "conv":
            shapes[layer] = ((config.hidden_size, config.conv_L_cache),)
        elif config.model_type == "qwen3_5_text":
            heads = config.linear_num_value_heads
            key_width = config.linear_key_head_dim
            value_width = config.linear_value_head_dim
            channels = 2 * config.linear_num_key_heads * key_width + heads * value_width
            shapes[layer] = (
                (channels, config.linear_conv_kernel_dim),
                (heads, key_width, value_width),
            )
    return shapes


def refuse_as_sibling(config: PretrainedConfig) -> None:
    """Raise unless the layers of a supported model can be exported as a drafter for the device."""
    reason = ""
    if config.model_type not in FAMILIES:
        reason = "exported graphs were not checked with this family"
    elif len(running_states(config)) < len(recurrent_layers(config)):
        reason = "its running states have no place in the exported graph's cache yet"
    elif len({*cached_layers(config).values()}) != 1 or getattr(
        config, "num_kv_shared_layers", None
    ):
        reason = (
            "its layers cache keys and values of different shapes, which the graph does not yet"
        )
    elif any(getattr(config, name, None) for name in ("num_experts", "num_local_experts")):
        reason = "its experts are chosen while it runs, which an exported graph cannot"
    if reason:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be a sibling: {reason}",
            hint="take a dense model of the same tokenizer, or train a drafter: `moa-train`",
        )


def scaling_of(config: PretrainedConfig) -> Scaling:
    """How this model scales embeddings and logits."""
    embedding = 1.0
    known = _family(config.model_type)
    if known.embedding == "root of width":
        embedding = float(config.hidden_size**0.5)
    elif known.embedding == "multiplier":
        embedding = float(config.embedding_multiplier)
    return Scaling(
        embedding=embedding,
        logits=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


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
        if not isinstance(rope, Mapping):
            raise UsageError(f"the model's config: {setting} must be an object, not {rope!r}")
        for scope in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
            yield str(scope.get("rope_type") or scope.get("type"))
