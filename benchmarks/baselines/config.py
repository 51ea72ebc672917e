"""The shape of a baseline drafter, saved beside its weights; `model_type` is its kind."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from moa.config import TargetFacts
from moa.errors import ConfigError, UsageError
from moa.model.eagle3 import authors_taps

Kind = Literal["eagle2", "solved"]


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """A Llama-style drafter of the target's width. Embedding and head are always the target's, frozen."""

    kind: Kind
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int
    target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"baseline config: kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        for name in ("hidden_size", "heads", "kv_heads", "intermediate_size", "vocab_size", "target_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"baseline config: {name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(f"baseline config: {self.heads} heads on {self.kv_heads} KV heads do not fit its width")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    @property
    def taps(self) -> tuple[int, ...]:
        """The states that it reads beside the final one, or with it."""
        return (*authors_taps(self.target_layers), self.target_layers) if self.kind == "solved" else ()

    @classmethod
    def for_target(cls, kind: Kind, facts: TargetFacts, *, intermediate_size: int, heads: int, kv_heads: int) -> Self:
        """A drafter for a target; the heads are the drafter's own."""
        return cls(
            kind=kind,
            hidden_size=facts.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            intermediate_size=intermediate_size,
            vocab_size=facts.vocab_size,
            target_layers=facts.layers,
            rms_norm_eps=facts.rms_norm_eps,
            rope_theta=facts.rope_theta,
        )

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts) -> Self:
        """Read `config.json`, and refuse a drafter of another target."""
        values = read_config(folder)
        kind = values.pop("model_type", None)
        if kind not in get_args(Kind):
            raise ConfigError(f"{folder}: model_type is {kind!r}, a baseline's is one of {', '.join(get_args(Kind))}")
        try:
            config = cls(kind=kind, **values)
        except TypeError as error:
            raise ConfigError(f"{folder / 'config.json'}: {error}") from None
        for name, value in (
            ("hidden_size", facts.hidden_size),
            ("vocab_size", facts.vocab_size),
            ("target_layers", facts.layers),
        ):
            if getattr(config, name) != value:
                raise ConfigError(
                    f"{folder}: made for another target: its {name} is {getattr(config, name)}, the target's is {value}"
                )
        return config

    def write(self, folder: Path) -> None:
        """Write `config.json`."""
        values = dataclasses.asdict(self)
        values = {"model_type": values.pop("kind"), **values}
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's `config.json`, of whatever kind."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no drafter at {folder}: config.json is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not valid JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values
