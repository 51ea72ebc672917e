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
class LayerMemory:
    """What the layers of a model keep of a text, by layer. A layer in neither keeps nothing: it
    reads the rows of an earlier one."""

    cached: Mapping[int, tuple[int, int]]
    """KV heads of each layer that keeps keys and values of its own, and their width."""
    running: Mapping[int, tuple[tuple[int, ...], ...]]
    """Shapes of the running states of each layer that keeps those instead."""


@dataclass(frozen=True)
class Scaling:
    """What a model multiplies its embeddings and its logits with, and bends these to."""

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise an `UnsupportedModelError` that says why, unless a model with this `config.json` can be
    a target."""
    family = str(config.get("model_type") or "of no model_type")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModelError("config.json says layer_types that are no list of names")
    first_reason = next(_reasons(config, family), None)
    if first_reason is not None:
        raise UnsupportedModelError(f"{family} cannot be a target: {first_reason}")
    _check_numbers(config)


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse dimensions that no model has, before anything divides by them."""
    for name in _DIMENSIONS:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UnsupportedModelError(f"config.json says {name}: {str(value)[:40]!r}")


def _reasons(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Yield each reason why a model with this `config.json` cannot be a target; none if it can.

    A target must keep nothing of a text but keys and values that later tokens attend over, and what
    it computes for one text must not depend on the others. A family that is known may be allowed a
    setting (`understands`) that is a reason in any other.
    """
    known = _FAMILIES.get(family, Family())
    yield from _reasons_in_settings(config, known)
    yield from _reasons_in_layers(config, known)
    # The config files of some families do not name the setting that is the reason.
    if family in _REASON_BY_FAMILY:
        yield _REASON_BY_FAMILY[family]
    if any(_depends_on_batch(rope_type, family) for rope_type in _rope_types(config)):
        yield _ROPE
    if known.chains_only and not hasattr(Cache, "get_recurrent_state"):
        yield "its running states need transformers 5"
    sharing_layers = config.get("num_kv_shared_layers")
    if family == "gemma4_text" and sharing_layers == config.get("num_hidden_layers"):
        yield "all of its layers read another model's keys and values"


def _reasons_in_settings(config: Mapping[str, Any], known: Family) -> Iterator[str]:
    """Yield the reason for each setting that a target cannot have."""
    for setting, reason in _REASON_BY_SETTING.items():
        value = config.get(setting)
        if not value or setting in known.understands:
            continue
        # `use_bidirectional_attention` may say "vision": pictures see each other, and a text is
        # read from left to right.
        if value != "vision":
            yield reason


def _reasons_in_layers(config: Mapping[str, Any], known: Family) -> Iterator[str]:
    """Yield the reason for each layer of a kind that a target cannot have."""
    for kind in config.get("layer_types") or ():
        if kind in _ATTENTION_KINDS:
            continue
        if known.chains_only and kind in RECURRENT_KINDS:
            continue
        yield _CHUNKED if kind == "chunked_attention" else _RUNNING_STATE


def _depends_on_batch(rope_type: str, family: str) -> bool:
    """Whether rotary frequencies of this type change with the longest row of a batch. Some families'
    are settled beforehand, by the longest text that a target serves."""
    if rope_type in _ROPE_TO_SETTLE:
        return family not in _SETTLED_ROPE
    return rope_type in _BATCH_DEPENDENT_ROPE


def _family(name: str) -> Family:
    """What differs from Llama in the family of this name. A family that is not known differs in
    nothing: its models run only if they are plain (`plain.py`)."""
    return _FAMILIES.get(name, _LLAMA)


def mask_plan(config: PretrainedConfig) -> MaskPlan:
    """Return the sliding window of each kind of layer of a model, in tokens (None: no window), and
    whether the model takes one mask for all layers or one for each kind."""
    family = _family(config.model_type)
    window = getattr(config, "sliding_window", None)
    windows: dict[str, int | None]
    if family.masks == "by kind":
        windows = dict.fromkeys(sorted(set(config.layer_types)))
        if "sliding_attention" in windows:
            windows["sliding_attention"] = window
        return MaskPlan(windows, per_layer_type=True)
    # These models use a sliding window in every layer or in none, and take one mask.
    windows = {"all": window if family.windowed else None}
    return MaskPlan(windows, per_layer_type=False)


def layer_windows(config: PretrainedConfig) -> dict[int, int]:
    """The layers, by number, that look through a sliding window, and how many tokens each sees. A
    window that is as long as the longest text hides nothing, and is left out."""
    plan = mask_plan(config)
    found: dict[int, int] = {}
    for layer in range(config.num_hidden_layers):
        kind = config.layer_types[layer] if plan.per_layer_type else "all"
        window = plan.windows[kind]
        if window is not None and window < config.max_position_embeddings:
            found[layer] = window
    return found


def chains_only(config: PretrainedConfig) -> bool:
    """Whether layers keep one running state, so that drafts cannot branch."""
    return _family(config.model_type).chains_only


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """Layers that keep a running state instead of keys and values."""
    kinds = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_KINDS]


def cached_layers(config: PretrainedConfig) -> dict[int, tuple[int, int]]:
    """For each layer that keeps keys and values of its own, its number of KV heads and the width of
    a head. Other layers keep a running state, or read the keys and values of an earlier layer."""
    recurrent = set(recurrent_layers(config))
    # The last layers of some models share: they read the keys and values of an earlier one.
    sharing_layers = getattr(config, "num_kv_shared_layers", None) or 0
    layer_configs = getattr(config, "per_layer_config", None)
    shapes = {}
    for layer in range(config.num_hidden_layers - sharing_layers):
        if layer not in recurrent:
            shapes[layer] = _cache_shape(layer_configs[layer] if layer_configs else config)
    return shapes


def _cache_shape(config: Any) -> tuple[int, int]:
    """The number of KV heads and the width of a head of a layer, or of all layers of a model."""
    head_dim = getattr(config, "head_dim", None)
    if not head_dim:
        head_dim = config.hidden_size // config.num_attention_heads
    return int(config.num_key_value_heads), int(head_dim)


def facts_of(config: PretrainedConfig, eos: int | list[int] | None) -> TargetFacts:
    """The dimensions of a supported model, as the rest of the project needs them. `eos`, the tokens
    that end a text, comes from the model's generation settings."""
    if eos is None:
        eos_ids = []
    elif isinstance(eos, list):
        eos_ids = eos
    else:
        eos_ids = [eos]
    shapes = list(cached_layers(config).values())
    kv_heads, head_dim = shapes[0]  # where layers differ, those of the first one stand for all
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
        # Whether every layer keeps keys and values, and all in one shape.
        uniform_cache=shapes == [(kv_heads, head_dim)] * config.num_hidden_layers,
    )


def _norm_eps(config: PretrainedConfig) -> float:
    """The small number that keeps the norms from dividing by zero; families name it differently. 0
    where a config says none."""
    for name in ("norm_eps", "rms_norm_eps", "layer_norm_eps", "norm_epsilon"):
        if hasattr(config, name):
            return float(getattr(config, name))
    return 0.0


def layer_memory(config: PretrainedConfig) -> LayerMemory:
    """What the layers of a sibling keep."""
    return LayerMemory(cached=cached_layers(config), running=running_states(config))


def per_layer_width(config: PretrainedConfig) -> int:
    """Numbers that a token brings to the layers beside its embedding, all layers together (Gemma 4
    E2B and E4B); 0 for other models."""
    of_layer = getattr(config, "hidden_size_per_layer_input", None) or 0
    return int(of_layer * config.num_hidden_layers)


def running_states(config: PretrainedConfig) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The shapes of the states of each layer that keeps a running state instead of keys and values,
    by the layer's number. A short convolution keeps its latest inputs `(channels, kernel)`; a gated
    delta rule keeps these and its memory `(heads, key width, value width)`. Layers of other
    recurrent kinds are left out: an exported graph cannot carry their states."""
    shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in recurrent_layers(config):
        if config.layer_types[layer] == "conv":
            shapes[layer] = ((config.hidden_size, config.conv_L_cache),)
        elif config.model_type == "qwen3_5_text":
            heads = config.linear_num_value_heads
            key_width = config.linear_key_head_dim
            value_width = config.linear_value_head_dim
            # The convolution runs over queries, keys and values side by side.
            channels = 2 * config.linear_num_key_heads * key_width + heads * value_width
            shapes[layer] = (
                (channels, config.linear_conv_kernel_dim),
                (heads, key_width, value_width),
            )
    return shapes


def refuse_as_sibling(config: PretrainedConfig) -> None:
    """Raise unless the layers of a supported model can be exported as a drafter for the device."""
    reason = _why_no_sibling(config)
    if reason:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be a sibling: {reason}",
            hint="take a dense model of the same tokenizer, or train a drafter: `moa-train`",
        )


def _why_no_sibling(config: PretrainedConfig) -> str:
    """Why a supported model cannot be exported as a drafter for the device, in words; empty if it
    can."""
    if config.model_type not in FAMILIES:
        return "exported graphs were not checked with this family"
    if len(running_states(config)) < len(recurrent_layers(config)):
        return "its running states have no place in the exported graph's cache yet"
    if per_layer_width(config) and config.vocab_size_per_layer_input < config.vocab_size:
        return "some of its tokens have no per-layer embedding"
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        return "its experts are chosen while it runs, which an exported graph cannot"
    return ""


def scaling_of(config: PretrainedConfig) -> Scaling:
    """What a model multiplies its embeddings and its logits with, and the bound (soft cap) towards
    which it bends large logits, if it has one."""
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
    """The base of the rotary frequencies; of layers with full attention where layers differ."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # transformers before 5
        return float(config.rope_theta)
    # Where layers differ, there are parameters for each kind of layer.
    return float(rope.get("full_attention", rope)["rope_theta"])


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield every type of rotary scaling that a config.json names, for all layers or for a kind."""
    for setting in ("rope_scaling", "rope_parameters"):
        rope = config.get(setting) or {}
        if not isinstance(rope, Mapping):
            raise UsageError(f"the model's config: {setting} must be an object, not {rope!r}")
        of_kinds = [value for value in rope.values() if isinstance(value, Mapping)]
        for parameters in (rope, *of_kinds):
            yield str(parameters.get("rope_type") or parameters.get("type"))
