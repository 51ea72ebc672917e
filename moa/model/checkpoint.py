"""A drafter on disk: `config.json` and safetensors under the paper's published names. Never a
pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from moa.errors import ConfigError, UsageError

WEIGHTS = "model.safetensors"
Filled = TypeVar("Filled", bound=nn.Module)


def filled(make: Callable[[], Filled], state: dict[str, torch.Tensor], folder: Path) -> Filled:
    """Build the module that `make` makes, with the weights `state` of `folder`. Weights that do not
    fit it are refused before memory is taken for it."""
    with torch.device("meta"):  # shapes without memory
        weights = _fitting(make(), state, folder)
    module = make()
    module.load_state_dict(weights)
    return module


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder's safetensors files, by name; a `UsageError` if there is no such
    file, or a damaged one."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"no drafter weights in {folder}: there is no *.safetensors file")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is not a readable safetensors file: {error}") from None
    return state


def _fitting(
    module: nn.Module, state: dict[str, torch.Tensor], folder: Path
) -> dict[str, torch.Tensor]:
    """Return the weights `state` that a module takes; a `ConfigError` unless they have exactly its
    names and shapes."""
    wanted = module.state_dict()
    # A published checkpoint may hold rotary frequencies, which follow from the config.
    state = {
        name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")
    }
    missing = sorted(set(wanted) - set(state))
    if missing:
        raise ConfigError(f"{folder}: the weights lack {missing[0]} and {len(missing) - 1} more")
    unknown = sorted(set(state) - set(wanted))
    if unknown:
        raise ConfigError(f"{folder}: the weights hold {unknown[0]}, which its config lacks")
    for name, value in state.items():
        if value.shape != wanted[name].shape:
            raise ConfigError(
                f"{folder}: {name} has shape {list(value.shape)}, by its config {list(wanted[name].shape)}"
            )
    return state


def save_drafter(drafter: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config and weights of any drafter, in `dtype` if given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(drafter, folder, dtype)
    drafter.config.write(folder)


def save_weights(module: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a module's own weights, without those it shares with the target."""
    state = {
        name: value.detach().to(dtype or value.dtype).contiguous()
        for name, value in module.state_dict().items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a model, without its head."""
    backbone = model.get_decoder()
    if not isinstance(backbone, nn.Module):
        raise UsageError(f"{type(model).__name__} has no decoder that a drafter could borrow from")
    return backbone
