"""The shape of a Mixture-of-Attentions drafter. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from moa.config import TargetFacts, read_config
from moa.errors import ConfigError

MODEL_TYPE = "moa_spec"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The shape of a MoA drafter. Field names follow the paper's published `config.json`, so that
    it loads as it is.

    The second block holds this project's extensions; their defaults are the paper's model exactly.
    """

    hidden_size: int
    kv_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    target_layers: int
    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    cross_attention_num_key_value_heads: int
    cross_attention_intermediate_size: int
    layer_self_attention_num_key_value_heads: int
    layer_self_attention_intermediate_size: int
    target_kv_heads: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    tli: int = 0
    """Borrowed target layers after CA (the paper's N)."""
    final_state: bool = False
    """Add the target's final hidden state to every activation. The KV cache does not contain it."""
    use_lsa: bool = True
    """Ablation: without it the target's final hidden state takes LSA's place."""
    use_ca: bool = True
    """Without it the drafter gets nothing from the target and is a plain language model."""
    layers: int = 1
    """Layers of the body, each with self-attention and its own KV cache; the paper's drafter has
    one."""
    final_norm: bool = False
    """The drafter has its own norm before the head."""
    body: Mapping[str, Any] | None = None
    """The `config.json` of a small causal language model that is the body, with its own embedding,
    norm and head. `hidden_size` and `layers` are then those of this model. None: the body is
    defined here, and uses the target's embedding and head."""
    scaled_embedding: bool = True
    """Tokens are embedded at the target's scale. Gemma's is the root of its width: beside it the
    layers of a fresh body count for nothing, and it predicts the current token again. A new body is
    made without."""
    target_hidden_size: int = 0
    """Width of the target's hidden states if it differs from the body's; 0: `hidden_size`."""

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that names the first field whose value is out of range, or does not
        fit the others."""
        may_be_zero = ("tli", "target_hidden_size")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name not in may_be_zero and value < 1:
                raise ConfigError(f"drafter config: {field.name} must be at least 1, not {value}")
        if self.hidden_act != "silu":
            raise ConfigError(
                f"drafter config: hidden_act {self.hidden_act!r} is not supported, only 'silu'"
            )
        if not 0 <= self.tli <= self.target_layers:
            raise ConfigError(
                f"drafter config: tli must be 0..{self.target_layers} (the target's layers)"
            )
        if self.tli and (self.body is not None or self.state_size != self.hidden_size):
            raise ConfigError(
                "drafter config: tli needs a body of the target's width, without a head of its own"
            )
        for width in ("hidden_size", "kv_hidden_size"):
            # Even, because a rotary embedding turns the numbers of a head in pairs.
            if getattr(self, width) % (2 * self.num_attention_heads):
                heads = self.num_attention_heads
                raise ConfigError(
                    f"drafter config: {width} must divide into {heads} even-sized heads"
                )
        for part in ("self_attention", "cross_attention", "layer_self_attention"):
            if self.num_attention_heads % getattr(self, f"{part}_num_key_value_heads"):
                raise ConfigError(
                    f"drafter config: {part}_num_key_value_heads must divide {self.num_attention_heads}"
                )

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads no states: records are made of the target's cache."""
        return ()

    @property
    def borrowed_layers(self) -> int:
        """The number of the target's last layers that it borrows (TLI)."""
        return self.tli

    @property
    def head_dim(self) -> int:
        """Width of a head of SA and CA."""
        return self.hidden_size // self.num_attention_heads

    @property
    def state_size(self) -> int:
        """Width of the target's states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def target_head_dim(self) -> int:
        """Width of a head of the target's keys and values."""
        return self.kv_hidden_size // (2 * self.target_kv_heads)

    @property
    def record_heads(self) -> int:
        """Heads of an activation record: cross-attention's."""
        return self.cross_attention_num_key_value_heads if self.use_ca else 0

    @property
    def record_width(self) -> int:
        """Numbers in one activation record: CA's keys and values of one position."""
        return 2 * self.record_heads * self.head_dim

    @classmethod
    def for_target(cls, facts: TargetFacts, **overrides: Any) -> Self:
        """The default shape of a drafter for a target with these facts: the target's width, at most
        a quarter as many KV heads as heads, and narrow feed-forward blocks. `overrides` are fields
        of this class, and win."""
        kv_width = 2 * facts.kv_heads * facts.head_dim  # a layer's key and value of one token
        heads = _heads_for(facts.heads, facts.hidden_size, kv_width)
        kv_heads = _largest_divisor(heads, most=max(1, heads // 4))
        shape: dict[str, Any] = {
            "hidden_size": facts.hidden_size,
            "kv_hidden_size": kv_width,
            "num_attention_heads": heads,
            "vocab_size": facts.vocab_size,
            "target_layers": facts.layers,
            "target_kv_heads": facts.kv_heads,
            "self_attention_num_key_value_heads": kv_heads,
            "cross_attention_num_key_value_heads": kv_heads,
            "layer_self_attention_num_key_value_heads": kv_heads,
            "self_attention_intermediate_size": _multiple_of_32(1.5 * facts.hidden_size),
            "cross_attention_intermediate_size": _multiple_of_32(1.5 * facts.hidden_size),
            "layer_self_attention_intermediate_size": _multiple_of_32(1.5 * kv_width),
            "rms_norm_eps": facts.rms_norm_eps,
            "rope_theta": facts.rope_theta,
            # Gemma's embeddings are so large that a fresh body counts for nothing beside them; but
            # borrowed layers (`tli`) expect the scale that the target gives them.
            "scaled_embedding": bool(overrides.get("tli")) or not facts.family.startswith("gemma"),
        }
        return cls.from_dict(shape | overrides)

    @classmethod
    def for_body(
        cls, facts: TargetFacts, own: TargetFacts, body: Mapping[str, Any], **overrides: Any
    ) -> Self:
        """The default shape of a drafter for the target with `facts` whose body is a complete
        language model: `own` are that model's facts, `body` is its `config.json`."""
        if "layers" in overrides and overrides["layers"] != own.layers:
            raise ConfigError(f"layers must be {own.layers}: the number of layers of the body")
        has_target_width = own.hidden_size == facts.hidden_size
        shape: dict[str, Any] = {
            "body": dict(body),
            "layers": own.layers,
            "target_hidden_size": 0 if has_target_width else facts.hidden_size,
        }
        of_body_width = dataclasses.replace(facts, hidden_size=own.hidden_size)
        return cls.for_target(of_body_width, **shape | overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping of field names to values; a `ConfigError` for an unknown field, a
        missing one, or a value of the wrong type."""
        fields = dataclasses.fields(cls)
        known = {field.name for field in fields}
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"drafter config: unknown setting {unknown[0]!r}",
                hint=f"known: {', '.join(sorted(known))}",
            )
        missing = sorted(required - set(values))
        if missing:
            raise ConfigError(f"drafter config: {missing[0]} is missing")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"drafter config: {error}") from None

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts | None = None) -> Self:
        """Read `config.json` of a drafter's folder: ours, or the paper's published layout.

        The published file leaves out the target's layers and KV heads; they are taken from `facts`.
        """
        path = folder / "config.json"
        values = read_config(folder, "drafter")
        model_type = values.get("model_type")
        if model_type != MODEL_TYPE:
            raise ConfigError(
                f"{path}: model_type {model_type!r} is neither of `moa-train` nor of the paper",
                hint="an EAGLE-3 drafter is for --server-drafter",
            )
        if values.get("rope_scaling") is not None:
            raise ConfigError(f"{path}: rope_scaling must be null: drafters are trained without it")
        if values.get("cross_attention_after", []) not in ([], [values.get("layers")]):
            raise ConfigError(
                f"{path}: cross_attention_after must be empty: records are read after all layers"
            )
        # A published or training config is a full Llama config that contains our fields: other
        # fields are ignored.
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        if facts is not None:
            values = {"target_layers": facts.layers, "target_kv_heads": facts.kv_heads} | values
        config = cls.from_dict(values)
        if facts is not None:
            config.check_fits(facts)
        return config

    def check_fits(self, facts: TargetFacts) -> None:
        """Raise if this drafter was made for a target with other dimensions, or if it reads keys
        and values, and the target's cannot be read because its layers differ."""
        if self.use_ca or self.tli:
            facts.check_readable()
        pairs = {
            "hidden_size": (self.state_size, facts.hidden_size),
            "vocab_size": (self.vocab_size, facts.vocab_size),
            "kv_hidden_size": (self.kv_hidden_size, 2 * facts.kv_heads * facts.head_dim),
            "target_layers": (self.target_layers, facts.layers),
        }
        for name, (mine, theirs) in pairs.items():
            if mine != theirs:
                raise ConfigError(
                    f"this was made for another target: its {name} is {mine}, the target's {theirs}"
                )

    def write(self, folder: Path) -> None:
        """Write `config.json`."""
        values = {"model_type": MODEL_TYPE, **dataclasses.asdict(self), "rope_scaling": None}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _heads_for(preferred: int, *widths: int) -> int:
    """A number of heads into which all widths divide, an even width for each: the preferred one, or
    the largest of a few."""
    for heads in (preferred, 8, 4, 2, 1):
        if all(width % (2 * heads) == 0 for width in widths):
            return heads
    return 1


def _largest_divisor(number: int, *, most: int) -> int:
    """The largest divisor of a number that is at most `most`."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def _multiple_of_32(width: float) -> int:
    """The multiple of 32 that is nearest to a width, and at least 32."""
    return max(32, round(width / 32) * 32)
