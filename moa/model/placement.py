"""How a target's weights are held: quantized when they are loaded, or partly outside the device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moa.errors import ConfigError, UsageError, how_to_install

QUANTIZED = ("", "int8")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the weights are. The default: all on one device, as they are stored."""

    quantize: str = ""
    """`int8`: the decoder's matrices in eight bits a weight, by torchao; embedding, norms and head stay as they are."""
    resident_layers: int = -1
    """Decoder layers that stay on the device; the others are brought there for every forward. -1: all stay."""
    offload_folder: Path | None = None
    """Where those others are read from."""

    def __post_init__(self) -> None:
        if self.quantize not in QUANTIZED:
            raise ConfigError(f"unknown quantization {self.quantize!r}", hint="the only one made here is int8")
        if self.resident_layers < -1:
            raise ConfigError(f"resident_layers must be at least 0, not {self.resident_layers}")
        if self.offload_folder is not None and not self.offloads:
            raise ConfigError("an offload folder needs --resident-layers N: how many layers are not read from it")
        if self.quantize and self.offloads:
            raise ConfigError("choose one of --quantize and --resident-layers")

    @property
    def offloads(self) -> bool:
        """Whether some layers are not on the device."""
        return self.resident_layers >= 0

    @property
    def whole(self) -> bool:
        """Whether one device holds every weight, as the packed decoder needs."""
        return not self.offloads

    def arguments(self, folder: Path, config: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """What `from_pretrained` must be told, beside dtype and attention."""
        if self.quantize:
            return self._quantized(folder, config, device)
        if self.offloads:
            return self._offloaded(folder, device)
        return {}

    def _quantized(self, folder: Path, config: dict[str, Any], device: torch.device) -> dict[str, Any]:
        if "quantization_config" in config:
            raise UsageError(f"the weights in {folder} are quantized already", hint="leave --quantize out")
        _need("torchao", "--quantize", "quantize")
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": {"": device}}

    def _offloaded(self, folder: Path, device: torch.device) -> dict[str, Any]:
        _need("accelerate", "--resident-layers", "offload")
        if device.type != "cpu":
            raise UsageError(
                f"--resident-layers does not work on {device.type}: on CUDA it read misaligned addresses and hung",
                hint="take --quantize int8, or --device cpu with --offload-folder DIR",
            )
        if self.offload_folder is None:
            raise UsageError("on a CPU layers can only be offloaded to a disk", hint="give --offload-folder DIR")
        facts = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(facts, trust_remote_code=False)
        decoder = empty.get_decoder()
        where: dict[str, Any] = {}
        for name, part in empty.named_children():
            if part is not decoder:
                where[name] = str(device)
                continue
            where |= {f"{name}.{inner}": str(device) for inner, _ in part.named_children() if inner != "layers"}
            for layer in range(len(part.layers)):
                where[f"{name}.layers.{layer}"] = str(device) if layer < self.resident_layers else "disk"
        return {"device_map": where, "offload_folder": self.offload_folder}  # a device's name: accelerate hands it on


def _need(package: str, flag: str, extra: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"{flag} needs {package}", hint=how_to_install(extra))
