"""Training-time test from a part of the tokens: what drafters of features train on, at a fraction of the cost.

Every token is predicted from the true feature before it; then, from one anchor in every `length` tokens, a chain reads
its own outputs, as in drafting. A chain's tokens count `length` times: in expectation that is the loss of chains from
every token, and seven steps cost two forwards in place of seven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines.features import shifted
from moa.model.blocks import additive
from moa.training.data import Batch
from moa.training.distill import Distillation, DistillSettings
from moa.training.loop import Loss
from moa.training.masks import same_document
from moa.training.teacher import Teacher


@dataclass(frozen=True)
class Stream:
    """Chains of so many tokens, in this share of the steps, after the target's states or after none."""

    length: int
    share: float = 1.0
    states: bool = True
    weight: float = 1.0
    decay: float = 0.8
    """The token s further counts decay ** s."""


IN_STEP = (Stream(7),)
NEAR = (Stream(7, decay=0.6),)
ANYHOW = (
    Stream(7, 0.6, decay=0.6),
    Stream(20, 0.4, decay=0.9),
    Stream(1, 0.5, states=False, weight=0.7),
    Stream(7, 0.25, states=False, weight=0.7),
    Stream(20, 0.25, states=False, weight=0.7, decay=0.9),
)
"""In step or late, and in the same step a language model that has no states."""


class ChainTraining(Distillation):
    """The objective of drafters of features. Of streams with states, and of those without, each step draws one."""

    def __init__(
        self,
        model: Any,
        teacher: Teacher,
        settings: DistillSettings,
        seed: int = 0,
        streams: tuple[Stream, ...] = IN_STEP,
    ) -> None:
        super().__init__(model, teacher, settings, seed)
        self.model, self.streams = model, streams
        teacher.tap(model.config.taps)

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The weighted sum over all chains. Shown are the first tokens', with states and `alone`."""
        lesson = self.teacher(batch)
        device = lesson.hidden.device
        ids, positions, segments = (
            torch.from_numpy(x).to(device) for x in (batch.ids, batch.positions, batch.segments)
        )
        wanted = torch.from_numpy(batch.wanted).to(device)[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        wanted = F.pad(wanted, (0, 1))
        heads = self._heads(batch, step)
        luck = np.random.default_rng([self.seed, step, int(batch.rows[0])])
        total, weight = torch.zeros((), device=device), torch.zeros((), device=device)
        shown: dict[str, Tensor] = {}
        for stream in self._drawn(luck):
            features = before(self.model, lesson.states if stream.states else None, positions)
            states, goals, counts = [], [], []
            start = int(luck.integers(stream.length))
            for lag, hidden, at, valid in chains(self.model, ids, positions, segments, features, start, stream.length):
                chosen = wanted.gather(1, at) & valid
                states.append(hidden[chosen])
                goals.append(
                    lesson.hidden.gather(1, at.unsqueeze(-1).expand(*at.shape, lesson.hidden.shape[-1]))[chosen]
                )
                each = stream.weight * (stream.decay**lag * stream.length if lag else 1.0)
                counts.append(torch.full((len(states[-1]),), each, device=device))
            found = self._compare(torch.cat(states), torch.cat(goals), heads)
            counted, first = torch.cat(counts), len(counts[0])
            total, weight = total + (found.loss * counted).sum(), weight + counted.sum()
            name = "agree" if stream.states else "alone"
            shown |= {name: found.agree[:first].mean(), f"{name}_kl": found.loss.detach()[:first].mean()}
        # The loop divides what is shown by the weight.
        return Loss(total, weight, {name: value * weight for name, value in shown.items()})

    def _drawn(self, luck: np.random.Generator) -> Iterator[Stream]:
        for kind in (True, False):
            if some := [stream for stream in self.streams if stream.states is kind]:
                yield some[luck.choice(len(some), p=[stream.share for stream in some])]


def before(model: Any, states: Tensor | None, positions: Tensor) -> Tensor:
    """The feature before every token, from the target's `states`; where there is none, what the model has for it."""
    none = getattr(model, "absent", model.weight.new_zeros(model.feature_size))
    if states is None:
        return none.expand(*positions.shape, -1)
    return torch.where((positions > 0).unsqueeze(-1), shifted(model.read(states), positions), none)


def visible(model: Any, positions: Tensor, segments: Tensor) -> Tensor:
    """`[B, L, L]`: rows of true features that a token sees; where no feature was before it, a row is not used."""
    index = torch.arange(segments.shape[1], device=segments.device)
    causal = same_document(segments) & (index.view(1, 1, -1) <= index.view(1, -1, 1))
    if model.reads_first or hasattr(model, "absent"):
        return causal
    return causal & ((positions > 0).unsqueeze(1) | torch.eye(len(index), dtype=torch.bool, device=segments.device))


def chains(
    model: Any, ids: Tensor, positions: Tensor, segments: Tensor, features: Tensor, start: int, length: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """How far along its chain, the states, their places and which are valid: first all tokens after true features, then
    the chains from `start`, `start + length`, ..."""
    rows, size = ids.shape
    index = torch.arange(size, device=ids.device)
    causal = visible(model, positions, segments)
    hidden, past = model.step(ids, features, positions, additive(causal).unsqueeze(1), model.empty_rows(ids))
    yield 0, hidden, index.expand(rows, -1), torch.ones_like(ids, dtype=torch.bool)
    anchors = index[start : size - 1 : length]
    usable = segments[:, anchors] > 0
    if not (model.reads_first or hasattr(model, "absent")):
        usable &= positions[:, anchors] > 0
    for lag, last in drafted(model, ids, positions, causal, hidden, past, anchors, length):
        place = (anchors + lag).clamp(max=size - 1)
        inside = (anchors + lag < size) & (segments[:, place] == segments[:, anchors])
        yield lag, last, place.expand(rows, -1), usable & inside


def drafted(
    model: Any, ids: Tensor, positions: Tensor, causal: Tensor, hidden: Tensor, past: Any, anchors: Tensor, length: int
) -> Iterator[tuple[int, Tensor]]:
    """States of chains along the text from `anchors`: each reads its own outputs, true rows up to its anchor, and its
    own rows."""
    keys, values = past
    seen, last = causal[:, anchors], hidden[:, anchors]
    own = torch.eye(len(anchors), dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
    for lag in range(1, length):
        place = (anchors + lag).clamp(max=ids.shape[1] - 1)
        mask = additive(torch.cat([seen, *[own] * lag], -1)).unsqueeze(1)
        last, (key, value) = model.step(ids[:, place], model.again(last), positions[:, place], mask, (keys, values))
        keys, values = torch.cat([keys, key], -2), torch.cat([values, value], -2)
        yield lag, last
