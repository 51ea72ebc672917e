"""A drafter on disk: `config.json` and safetensors under the paper's published names. Never a
pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from moa.config import DrafterConfig, TargetFacts
from moa.errors import ConfigError, UsageError
from moa.model.borrowed import BorrowedLayers, SharedWeights, Sibling
from moa.model.drafter import Drafter
from moa.model.loading import LoadedModel

WEIGHTS = "model.safetensors"
Filled = TypeVar("Filled", bound=nn.Module)


def new_drafter(
    config: DrafterConfig, target: PreTrainedModel, body: Sibling | None = None
) -> Drafter:
    """An untrained drafter beside its target; a `body` that is a language model keeps its weights."""
    drafter = _drafter(config, target, body)
    for module in drafter.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return drafter.to(device=target.device)


def drafter_around(
    target: PreTrainedModel,
    facts: TargetFacts,
    body: LoadedModel,
    shape: Mapping[str, Any],
    *,
    frozen: bool,
) -> Drafter:
    """A drafter whose body is an existing small language model. Its cross-attention is untrained
    and adds nothing at first. The body's embedding and head are never trained."""
    if body.facts.tokenizer_hash != facts.tokenizer_hash:
        raise UsageError(
            f"the model in {body.folder} has another tokenizer than the target",
            hint="a drafter's body must share the target's tokenizer",
        )
    described = json.loads(body.model.config.to_json_string(use_diff=False))
    config = DrafterConfig.for_body(facts, body.facts, described, **shape)
    drafter = new_drafter(config, target, Sibling(body.model))
    drafter.body.decoder.requires_grad_(not frozen)
    drafter.leave_records_out()
    return drafter.to(device=target.device, dtype=torch.float32)


def load_drafter(
    folder: Path,
    target: PreTrainedModel,
    facts: TargetFacts,
    dtype: torch.dtype | None = None,
    config: DrafterConfig | None = None,
) -> Drafter:
    """A trained drafter beside its target: one of ours or the paper's published checkpoint."""
    own = config or DrafterConfig.read(folder, facts)
    drafter = filled(lambda: _drafter(own, target), stored_weights(folder), folder)
    return drafter.to(device=target.device, dtype=dtype or target.dtype).eval()


def _drafter(
    config: DrafterConfig, target: PreTrainedModel, body: Sibling | None = None
) -> Drafter:
    borrowed = BorrowedLayers(backbone_of(target), config.tli) if config.tli else None
    return Drafter(config, SharedWeights.of(target), borrowed, body)


def filled(make: Callable[[], Filled], state: dict[str, torch.Tensor], folder: Path) -> Filled:
    """What `make` builds, with the weights `state` of `folder`; what does not fit is refused before
    memory is taken."""
    with torch.device("meta"):
        found = _fitting(make(), state, folder)
    module = make()
    module.load_state_dict(found)
    return module


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the folder's safetensors files hold."""
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
    """`state`, read from `folder`, which must have exactly the module's keys and shapes."""
    wanted = module.state_dict()
    state = {
        name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")
    }
    if missing := sorted(set(wanted) - set(state)):
        raise ConfigError(f"{folder}: the weights lack {missing[0]} and {len(missing) - 1} more")
    if unknown := sorted(set(state) - set(wanted)):
        raise ConfigError(f"{folder}: the weights hold {unknown[0]}, which its config lacks")
    for name, value in state.items():
        if value.shape != wanted[name].shape:
            raise ConfigError(
                f"{folder}: {name} has shape {list(value.shape)}, by its config {list(wanted[name].shape)}"
            )
    return state


def save_drafter(drafter: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write config and weights of a drafter of either kind, in `dtype` if given."""
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
    """The decoder without the head."""
    backbone = model.get_decoder()
    if not isinstance(backbone, nn.Module):
        raise UsageError(f"{type(model).__name__} has no decoder that a drafter could borrow from")
    return backbone
