"""A body that starts as layers of its target: the embedded pair's drafter began so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moa.drafters.attention.model import AttentionDrafter
from moa.errors import ConfigError
from moa.model.blocks import Block
from moa.model.checkpoint import backbone_of
from moa.training.data import Batch
from moa.training.teacher import Teacher

CALIBRATION_ROWS = 16
"""Packed rows over which a feed-forward's units are measured."""


@torch.no_grad()
def inherit(
    drafter: AttentionDrafter, teacher: Teacher, layers: Sequence[int], batch: Batch
) -> None:
    """Build the body from these layers of the target, in order, with the most active units of their
    feed-forwards; cross-attention adds nothing at first. Embedding and head are the target's
    already, so such a body produces sensible text from the first step, and distillation only
    repairs the pruning."""
    config, backbone = drafter.config, backbone_of(teacher.model)
    theirs: list[Any] = list(backbone.layers)  # type: ignore[arg-type]
    if (
        config.body is not None
        or len(layers) != config.layers
        or not all(0 <= i < len(theirs) for i in layers)
    ):
        raise ConfigError(
            f"the body needs {config.layers} of the target's layers, each 0..{len(theirs) - 1}"
        )
    use = _use_of_units(teacher, [theirs[i] for i in layers], batch)
    for block, index, worth in zip(drafter.body_blocks, layers, use, strict=True):
        _take(block, theirs[index], worth)
    if config.final_norm:
        drafter.norm.weight.copy_(backbone.norm.weight)  # type: ignore[union-attr, arg-type]
    drafter.leave_records_out()


def _use_of_units(teacher: Teacher, layers: Sequence[Any], batch: Batch) -> list[Tensor]:
    """How much each unit of a feed-forward adds to its layer's output, on average."""
    worth = [torch.zeros(layer.mlp.down_proj.in_features) for layer in layers]
    hooks = []
    for layer, total in zip(layers, worth, strict=True):
        size = layer.mlp.down_proj.weight.float().norm(dim=0).cpu()

        def note(
            _: nn.Module, inputs: tuple[Tensor], total: Tensor = total, size: Tensor = size
        ) -> None:
            total += inputs[0].float().abs().flatten(0, -2).mean(0).cpu() * size

        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(note))
    try:
        teacher(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return worth


def _take(block: Block, layer: Any, worth: Tensor) -> None:
    state = dict(layer.state_dict())
    kept = worth.topk(min(block.mlp.gate_proj.out_features, len(worth))).indices.sort().values
    for name in ("gate_proj", "up_proj"):
        state[f"mlp.{name}.weight"] = state[f"mlp.{name}.weight"][kept]
    state["mlp.down_proj.weight"] = state["mlp.down_proj.weight"][:, kept]
    wanted = {name: value.shape for name, value in block.state_dict().items()}
    if wanted != {name: value.shape for name, value in state.items()}:
        raise ConfigError(
            "the body cannot start from the target's layers: their attention has another shape or other parts",
            hint="give the body the target's heads and KV heads",
        )
    block.load_state_dict({name: value.float() for name, value in state.items()})
