"""The `config.json` of published EAGLE-3 drafters, whichever layout it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import LlamaConfig

from moa.config import TargetFacts, read_config
from moa.drafters.taps import authors_taps
from moa.errors import ConfigError, first_line


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What a checkpoint's `config.json` says, whichever layout it has."""

    layer: LlamaConfig
    """The decoder layer's dimensions and rotary embedding."""
    taps: tuple[int, ...]
    """The target's layers whose inputs are read, counted from 0."""
    target_hidden_size: int
    norm_before_residual: bool
    """The layer's residual is the normed feature."""
    norm_before_fc: bool
    """One norm over all states side by side."""
    fc_norm: bool
    """A norm for each of them."""
    norm_output: bool
    """What is fed back is the output behind the last norm."""

    @property
    def borrowed_layers(self) -> int:
        """It borrows no layers."""
        return 0

    def write(self, folder: Path) -> None:
        """Published checkpoints are read, not written."""
        raise NotImplementedError("an EAGLE-3 config is that of its publisher")

    @classmethod
    def read(cls, folder: Path, facts: TargetFacts) -> Self:
        """Read `config.json`, in any of the layouts in which EAGLE-3 drafters are published. Raise
        a `ConfigError` unless it describes one Llama layer, made for a target with these facts."""
        values = read_config(folder)
        # Publishers put some settings into a part of their own, and some beside it.
        eagle_values = values.get("eagle_config") or {}
        layer_values = values.get("transformer_layer_config") or values
        is_known = isinstance(eagle_values, dict) and isinstance(layer_values, dict)
        if not is_known or layer_values.get("model_type", "llama") != "llama":
            raise ConfigError(
                f"{folder}: config.json is not that of an EAGLE-3 drafter with a Llama layer"
            )
        norms = {**values, **eagle_values}
        try:
            config = cls(
                layer=LlamaConfig(**layer_values),
                taps=_taps(values, eagle_values, facts.layers),
                target_hidden_size=int(values.get("target_hidden_size") or facts.hidden_size),
                **{name: bool(norms.get(name)) for name in NORMS},
            )
        except Exception as error:  # the library raises whatever an odd value runs into
            raise ConfigError(
                f"{folder}: config.json cannot be read: {first_line(error)}"
            ) from None
        config._check(folder, facts)
        return config

    def _check(self, folder: Path, facts: TargetFacts) -> None:
        """Raise a `ConfigError` unless this project can compute the drafter, its numbers fit each
        other, and it was made for a target with these facts."""
        layer = self.layer
        if (
            layer.num_hidden_layers != 1
            or layer.attention_bias
            or layer.mlp_bias
            or layer.hidden_act != "silu"
        ):
            raise ConfigError(
                f"{folder}: only EAGLE-3 drafters of one Llama layer without biases are supported"
            )
        if self.target_hidden_size != facts.hidden_size:
            raise ConfigError(
                f"{folder}: made for another target: it reads states of {self.target_hidden_size} numbers, this "
                f"target's have {facts.hidden_size}"
            )
        if not self.taps or not all(0 <= tap < facts.layers for tap in self.taps):
            raise ConfigError(
                f"{folder}: it reads layers {list(self.taps)}, the target has 0..{facts.layers - 1}"
            )
        heads = layer.num_attention_heads
        kv_heads = layer.num_key_value_heads or 0
        head_dim = layer.head_dim or 0
        sizes = (layer.hidden_size, layer.intermediate_size, heads, kv_heads, head_dim)
        if min(sizes) < 1 or heads % kv_heads or head_dim % 2:
            raise ConfigError(f"{folder}: the dimensions of its layer do not fit each other")


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _taps(
    values: Mapping[str, Any], eagle_values: Mapping[str, Any], layers: int
) -> tuple[int, ...]:
    """The target's layers, counted from 0, whose inputs the drafter reads. In `eagle_config`
    (SpecForge) a number names the layer whose output is read; at the top level (`speculators`,
    vLLM) the layer whose input is read; without either it is the authors' rule."""
    inputs = values.get("eagle_aux_hidden_state_layer_ids")
    if inputs is not None:
        return tuple(int(number) for number in inputs)
    outputs = eagle_values.get("eagle_aux_hidden_state_layer_ids")
    if outputs is not None:
        # The output of a layer is the input of the next one.
        return tuple(int(number) + 1 for number in outputs)
    return authors_taps(layers)
