"""The few tensors of a large target that a drafter shares, read from safetensors without loading the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from moa.config import TargetFacts
from moa.errors import UsageError
from moa.model.attention import ATTENTION
from moa.model.families import facts_of, refuse_unsupported
from moa.model.identity import stored_tensors, weights_id
from moa.model.loading import LoadedModel, locate, read_config


def read_partial_target(source: str | Path, *, borrowed: int = 0) -> LoadedModel:
    """Read embedding, head, final norm and the last `borrowed` layers of a hub id or folder; the other layers stay on
    disk. The model is good for `load_drafter` and `SharedWeights.of`, but cannot be run; the facts are of the whole."""
    folder = locate(source)
    facts, config = _facts(folder)
    if not 0 <= borrowed <= facts.layers:
        raise UsageError(f"cannot borrow {borrowed} layers of a target that has {facts.layers}")
    model: Any = AutoModelForCausalLM.from_config(
        _shrunken(config, borrowed), attn_implementation=ATTENTION, dtype=torch.float32
    )
    names = {name: _name_in_target(name, facts.layers - borrowed) for name in model.state_dict()}
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    if facts.tie_embeddings:
        names.pop(f"{head}.weight", None)
    found = _read(folder, names.values())
    for name, theirs in names.items():
        _set(model, name, nn.Parameter(found.pop(theirs).float(), requires_grad=False))
    if facts.tie_embeddings:
        _set(model, f"{head}.weight", model.get_parameter(f"{embedding}.weight"))
    return LoadedModel(model.eval(), facts, folder)


def read_facts(source: str | Path) -> tuple[TargetFacts, Path]:
    """The facts of a target, and its folder, without reading its weights."""
    folder = locate(source)
    return _facts(folder)[0], folder


def _facts(folder: Path) -> tuple[TargetFacts, PretrainedConfig]:
    refuse_unsupported(read_config(folder))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    facts = facts_of(config, _end_tokens(folder, config))
    return dataclasses.replace(facts, weights_id=weights_id(folder, facts)), config


def _shrunken(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The config of a model with only the last layers and a vocabulary of one, so that unused parts cost no memory."""
    values = config.to_dict() | {"num_hidden_layers": layers, "vocab_size": 1, "pad_token_id": None}
    if kinds := values.get("layer_types"):
        values["layer_types"] = kinds[len(kinds) - layers :]
    return type(config).from_dict(values)


def _name_in_target(name: str, skipped: int) -> str:
    """`model.layers.0.x` of the shrunken model is `model.layers.{skipped}.x` of the target."""
    before, found, after = name.partition(".layers.")
    if not found:
        return name
    index, _, rest = after.partition(".")
    return f"{before}.layers.{int(index) + skipped}.{rest}"


def _read(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    stored = stored_tensors(folder)
    wanted = list(names)
    if missing := sorted(set(wanted) - set(stored)):
        raise UsageError(f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} among them")
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {stored[name].path for name in wanted}
        }
        return {name: files[stored[name].path].get_tensor(name) for name in wanted}


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def _end_tokens(folder: Path, config: PretrainedConfig) -> int | list[int] | None:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return getattr(config, "eos_token_id", None)
