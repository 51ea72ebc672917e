"""The shape of a drafter of states. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from moa.config import TargetFacts, read_config
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.taps import authors_taps
from moa.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StateDrafterConfig:
    """The drafter's `config.json`. Its width, embedding and head are the target's."""

    MODEL_TYPE: ClassVar = "moa-edge-state-drafter"

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    target_layers: int
    rms_norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that names the first field whose value is out of range, or does not
        fit the others."""
        for field in dataclasses.fields(self):
            name = field.name
            value = getattr(self, name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {value!r}")
        if self.target_layers < 3:
            raise ConfigError(
                "the target has too few layers: its states are read behind three of them"
            )
        heads = self.num_attention_heads
        # Twice the heads, because a rotary embedding turns the numbers of a head in pairs.
        if self.hidden_size % (2 * heads) or heads % self.num_key_value_heads:
            raise ConfigError(
                f"{heads} heads on {self.num_key_value_heads} KV heads do not fit its width"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads; the number behind the last is the final state."""
        return (*authors_taps(self.target_layers), self.target_layers)

    @property
    def borrowed_layers(self) -> int:
        """It borrows no layers."""
        return 0

    @property
    def cache(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the device's cache: the layer's keys and values, and the two halves of
        a feature."""
        keys_and_values = (self.num_key_value_heads, self.hidden_size // self.num_attention_heads)
        halves_of_feature = (1, self.hidden_size // 2)
        return keys_and_values, halves_of_feature

    @classmethod
    def for_target(cls, facts: TargetFacts, **overrides: int) -> Self:
        """The default shape of a drafter for a target with these facts: the heads and the
        feed-forward width of an attention drafter's layer. `overrides` are fields of this class."""
        like = AttentionConfig.for_target(facts)
        shape: dict[str, Any] = {
            "hidden_size": facts.hidden_size,
            "num_attention_heads": like.num_attention_heads,
            "num_key_value_heads": like.self_attention_num_key_value_heads,
            "intermediate_size": like.self_attention_intermediate_size,
            "vocab_size": facts.vocab_size,
            "target_layers": facts.layers,
            "rms_norm_eps": facts.rms_norm_eps,
            "rope_theta": facts.rope_theta,
        }
        return cls(**shape | overrides)

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts) -> Self:
        """Read `config.json` of a drafter's folder; a `ConfigError` if it is of another kind,
        damaged, or made for a target with other dimensions than `facts`."""
        values = read_config(folder, "drafter")
        model_type = values.pop("model_type", None)
        if model_type != cls.MODEL_TYPE:
            raise ConfigError(
                f"{folder}: model_type is {model_type!r}, that of a drafter of states is {cls.MODEL_TYPE!r}"
            )
        try:
            config = cls._from(values)
        except ConfigError as error:
            raise ConfigError(f"{folder / 'config.json'}: {error}") from None
        own = (config.hidden_size, config.vocab_size, config.target_layers)
        targets = (facts.hidden_size, facts.vocab_size, facts.layers)
        if own != targets:
            raise ConfigError(
                f"{folder}: made for another target: width, vocabulary and layers are {own}, the target's {targets}"
            )
        return config

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        """The configuration of a mapping that must have all fields, and no others."""
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted(names ^ set(values))  # names that only one of the two has
        if wrong:
            problem = "unknown" if wrong[0] in values else "missing"
            raise ConfigError(f"{wrong[0]} is {problem}")
        return cls(**values)

    def write(self, folder: Path) -> None:
        """Write `config.json`."""
        values = {"model_type": self.MODEL_TYPE, **dataclasses.asdict(self)}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
