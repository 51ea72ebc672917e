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
        """Freeze a model as the teacher, or a copy of it in another `dtype`. An
        `UnsupportedModelError` for one whose layers keep a running state."""
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
        self._taps_final_state = False

    def tap(self, layers: Sequence[int]) -> None:
        """Let outputs have the inputs of these layers, counted from 0, too. The number behind the
        last layer's, which can only come last, stands for the final state."""
        self._taps_final_state = layers[-1] == len(self.backbone.layers)  # type: ignore[arg-type]
        if self._taps_final_state:
            layers = layers[:-1]
        self._taps = Taps(self.backbone, layers)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TeacherOutput:
        """Run the target over a batch, each document of a row by itself, and return its results:
        final states, and the keys, values and states between layers that a drafter reads."""
        device = self.model.device
        segments = torch.from_numpy(batch.segments).to(device)
        cache = DynamicCache() if self.caches else None
        hidden = self.backbone(
            input_ids=torch.from_numpy(batch.ids).to(device),
            position_ids=torch.from_numpy(batch.positions).to(device),
            attention_mask=self._masks(causal(segments)),
            use_cache=self.caches,
            **{cache_argument(self.backbone): cache},
        ).last_hidden_state
        keys = hidden.new_zeros(0)
        values = hidden.new_zeros(0)
        if cache is not None:
            facts_of(self.model.config, None).check_readable()
            # From `[B, kv_heads, L, D]` of each layer to `[layers, B, L, kv_heads, D]`.
            layers: list[Any] = cache.layers
            keys = torch.stack([layer.keys for layer in layers]).transpose(2, 3)
            values = torch.stack([layer.values for layer in layers]).transpose(2, 3)
        tapped = None
        if self._taps is not None:
            tapped = self._taps.take()
            if self._taps_final_state:
                tapped = torch.cat([tapped, hidden], -1)
        return TeacherOutput(keys, values, hidden, tapped)

    def _masks(self, visible: Tensor) -> Any:
        """The additive attention masks, `[B, 1, L, L]`, as the library's model takes them: one, or
        a dict with one for each kind of layer where some look through a sliding window. `visible`
        `[B, L, L]` says which tokens each token sees without a window."""
        device = visible.device.type
        dtype = self.model.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        index = torch.arange(visible.shape[1], device=visible.device)
        distance = index.view(1, -1, 1) - index.view(1, 1, -1)
        plan = mask_plan(self.model.config)
        masks = {}
        for kind, window in plan.windows.items():
            within = visible if window is None else visible & (distance < window)
            masks[kind] = additive(within, dtype).unsqueeze(1)
        if plan.per_layer_type:
            return masks
        (only,) = masks.values()
        return only
