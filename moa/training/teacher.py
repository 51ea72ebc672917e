"""The target as a teacher: its caches, final states and logits on packed rows, computed on the fly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from moa.errors import UnsupportedModelError
from moa.model.blocks import additive
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import backbone_of
from moa.target.families import chains_only, facts_of, mask_plan
from moa.target.library import Taps, cache_argument
from moa.training.data import Batch
from moa.training.masks import causal


@dataclass(frozen=True)
class TeacherOutput:
    """The target's results for a batch: post-RoPE `keys` and `values` `[layers, B, L, kv_heads,
    D]`, its final, normed `hidden` states `[B, L, H]`, and the tapped states side by side, `[B, L,
    taps * H]`. Without caches, keys and values are empty."""

    keys: Tensor
    values: Tensor
    hidden: Tensor
    tapped: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """What a drafter of features reads: the tapped states, or else the final ones."""
        return self.hidden if self.tapped is None else self.tapped


class Teacher:
    """A frozen target, run over packed rows with a mask per document.

    With a `dtype` other than the model's it runs a copy: in bf16 a third faster on a CPU than the
    same under autocast.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype != model.dtype:
            model = copy.deepcopy(model)
            nn.Module.to(model, dtype)  # the library's wrapper hides its signature
        if chains_only(model.config):
            raise UnsupportedModelError(
                f"no drafter can be trained beside {model.config.model_type} yet: the documents of a "
                "packed row would share one running state",
                hint="take a sibling as it is: `moa-export setup`",
            )
        self.model = model.eval().requires_grad_(False)
        self.backbone = backbone_of(model)
        self.shared = SharedWeights.of(model)
        self.caches = True
        """Whether outputs have keys and values: a drafter of states reads none."""
        self._taps: Taps | None = None
        self._final = False

    def tap(self, layers: Sequence[int]) -> None:
        """From now on lessons have the inputs of these layers too, numbered as for `Target.tap`."""
        self._final = layers[-1] == len(self.backbone.layers)  # type: ignore[arg-type]
        self._taps = Taps(self.backbone, layers[: len(layers) - self._final])

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TeacherOutput:
        device = self.model.device
        segments = torch.from_numpy(batch.segments).to(device)
        index = torch.arange(segments.shape[1], device=device)
        kept = DynamicCache() if self.caches else None
        hidden = self.backbone(
            input_ids=torch.from_numpy(batch.ids).to(device),
            position_ids=torch.from_numpy(batch.positions).to(device),
            attention_mask=self._mask(causal(segments), index),
            use_cache=self.caches,
            **{cache_argument(self.backbone): kept},
        ).last_hidden_state
        keys = values = hidden.new_zeros(0)
        if kept is not None:
            facts_of(self.model.config, None).check_readable()
            keys, values = (
                torch.stack([getattr(layer, half) for layer in kept.layers]).transpose(2, 3)
                for half in ("keys", "values")
            )
        tapped = self._taps.take() if self._taps else None
        if tapped is not None and self._final:
            tapped = torch.cat([tapped, hidden], -1)
        return TeacherOutput(keys, values, hidden, tapped)

    def _mask(self, allowed: Tensor, index: Tensor) -> Any:
        """One mask, or one per kind of layer where the model mixes full attention with a sliding
        window."""
        device = allowed.device.type
        dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else self.model.dtype
        )
        distance = index.view(1, -1, 1) - index.view(1, 1, -1)
        plan = mask_plan(self.model.config)
        masks = {
            kind: additive(
                allowed if window is None else allowed & (distance < window), dtype
            ).unsqueeze(1)
            for kind, window in plan.windows.items()
        }
        return masks if plan.per_layer_type else next(iter(masks.values()))
