"""Trains drafters of features as they draft: along chains of their own outputs.

Every token is predicted from the target's states before it; then, from one anchor in every `length`
tokens, a chain reads its own outputs (EAGLE-3's training-time test). A chain's tokens count
`length` times: in expectation that is the loss of chains from every token, and seven steps cost two
forwards in place of seven. Every second step's chains are `late` tokens long, for states that come
late; and a drafter that goes on without any learns the whole text from its own outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moa.drafters.contract import Trainee, digest
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.least_squares import solve
from moa.drafters.states.model import StateDrafter
from moa.errors import UsageError
from moa.model.blocks import additive
from moa.model.borrowed import SharedWeights
from moa.target.loading import LoadedModel
from moa.training.config import TrainingConfig
from moa.training.data import Batch, PackedRows
from moa.training.loop import Loss
from moa.training.losses import LossSettings, TeacherLike, TeacherObjective, wanted_places
from moa.training.masks import causal


@dataclass(frozen=True, kw_only=True)
class ChainSettings(LossSettings):
    """Losses, and the chains."""

    length: int = 7
    late: int = 16
    decay: float = 1.0
    """The k-th token of a chain counts decay ** k. EAGLE-3's authors: 0.8."""
    absent: float = 4.0
    """What a token counts that is predicted without any state of the target; 0: such tokens are not
    learnt."""


class ChainTraining(TeacherObjective):
    """The objective of drafters of features."""

    settings: ChainSettings

    def __init__(
        self, model: Any, teacher: TeacherLike, settings: ChainSettings, seed: int = 0
    ) -> None:
        super().__init__(model, teacher, settings, seed)
        teacher.tap(model.config.taps)

    def start(self, rows: PackedRows) -> None:
        """The maps as the least-squares solution, for drafters that have such maps."""
        solve(self.module, self.teacher, rows)

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The weighted sum over all chains. Metrics: how often the first token is right, each of the
        later ones if those before it are, and a token without any state."""
        model: Any = self.module
        known = self.teacher(batch)
        device = known.hidden.device
        settings = self.settings
        ids, positions, segments = (
            torch.from_numpy(x).to(device) for x in (batch.ids, batch.positions, batch.segments)
        )
        wanted = wanted_places(batch).to(device)
        features = shifted(model.read(known.states), positions)
        drawn = np.random.default_rng([self.seed, step])  # in every process the same
        length = settings.late if drawn.random() < 0.5 else settings.length
        start = int(drawn.integers(length))
        states = []
        goals = []
        counts = []
        for lag, hidden, at, valid in chains(
            model, ids, positions, segments, features, start, length
        ):
            chosen = wanted.gather(1, at) & valid
            states.append(hidden[chosen])
            goals.append(
                known.hidden.gather(1, at.unsqueeze(-1).expand(*at.shape, known.hidden.shape[-1]))[
                    chosen
                ]
            )
            each = settings.decay**lag * length if lag else 1.0
            counts.append(torch.full((len(states[-1]),), each, device=device))
        first = len(counts[0])
        of_chains = sum(map(len, counts))
        if settings.absent:
            states.append(absent(model, ids, positions, segments)[wanted])
            goals.append(known.hidden[wanted])
            counts.append(torch.full((len(states[-1]),), settings.absent, device=device))
        found = self._compare(torch.cat(states), torch.cat(goals), self._heads(batch, step))
        counted = torch.cat(counts)
        weight = counted.sum()
        parts = {
            "agree": (0, first),
            "agree_later": (first, of_chains),
            "agree_absent": (of_chains, len(counted)),
        }
        # The loop divides metrics by the weight.
        metrics = {
            name: (found.agree[a:b].mean() if b > a else weight.new_zeros(())) * weight
            for name, (a, b) in parts.items()
            if settings.absent or name != "agree_absent"
        }
        return Loss((found.loss * counted).sum(), weight, metrics)


def shifted(features: Tensor, positions: Tensor) -> Tensor:
    """`[B, L, H]` by one place: the feature before each token, zeros at the first of a document."""
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    return before * (positions > 0).unsqueeze(-1).to(features.dtype)


def visible(model: Any, positions: Tensor, segments: Tensor) -> Tensor:
    """`[B, L, L]`: rows of true features that a token sees; where no feature was before it, a row
    may not be used."""
    seen = causal(segments)
    if model.reads_first:
        return seen
    itself = torch.eye(segments.shape[1], dtype=torch.bool, device=segments.device)
    return seen & ((positions > 0).unsqueeze(1) | itself)


def chains(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    segments: Tensor,
    features: Tensor,
    start: int,
    length: int,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """How far along its chain, the states, their places and which are valid: first all tokens after
    true features, then the chains from `start`, `start + length`, ..."""
    rows, size = ids.shape
    index = torch.arange(size, device=ids.device)
    seen = visible(model, positions, segments)
    hidden, past = model.step(
        ids, features, positions, additive(seen).unsqueeze(1), model.empty_rows(ids)
    )
    yield 0, hidden, index.expand(rows, -1), torch.ones_like(ids, dtype=torch.bool)
    anchors = index[start : size - 1 : length]
    usable = segments[:, anchors] > 0
    if not model.reads_first:
        usable &= positions[:, anchors] > 0
    for lag, last in drafted(model, ids, positions, seen, hidden, past, anchors, length):
        place = (anchors + lag).clamp(max=size - 1)
        inside = (anchors + lag < size) & (segments[:, place] == segments[:, anchors])
        yield lag, last, place.expand(rows, -1), usable & inside


def absent(model: Any, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
    """States without any of the target's: of a second pass, whose features are what the first made
    of the token before. On the device each token reads what the one before it made; two passes come
    close, and run all tokens at once."""
    mask = additive(visible(model, positions, segments)).unsqueeze(1)
    features = torch.zeros(
        *ids.shape, model.feature_size, dtype=model.weight.dtype, device=ids.device
    )
    for _ in range(2):
        hidden, _ = model.step(ids, features, positions, mask, model.empty_rows(ids))
        features = shifted(model.feedback(hidden), positions)
    return hidden


def drafted(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    visible: Tensor,
    hidden: Tensor,
    past: Any,
    anchors: Tensor,
    length: int,
) -> Iterator[tuple[int, Tensor]]:
    """States of chains along the text from `anchors`: each reads its own outputs, true rows up to
    its anchor, and its own rows."""
    keys, values = past
    seen = visible[:, anchors]
    last = hidden[:, anchors]
    own = torch.eye(len(anchors), dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
    for lag in range(1, length):
        place = (anchors + lag).clamp(max=ids.shape[1] - 1)
        mask = additive(torch.cat([seen, *[own] * lag], -1)).unsqueeze(1)
        last, (key, value) = model.step(
            ids[:, place], model.feedback(last), positions[:, place], mask, (keys, values)
        )
        keys = torch.cat([keys, key], -2)
        values = torch.cat([values, value], -2)
        yield lag, last


_DIMENSIONS = {
    "num_attention_heads": "num_attention_heads",
    "self_attention_intermediate_size": "intermediate_size",
    "self_attention_num_key_value_heads": "num_key_value_heads",
}
"""Dimensions of the one layer, by the names that all drafters share."""


def trainee(config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
    """A new drafter, which starts as a least-squares solution, or that of `config.init`."""
    shared = SharedWeights.of(target.model)
    if config.init is not None:
        return _from(config, target, shared, teacher)
    dimensions = {_DIMENSIONS[name]: value for name, value in config.shape.items()}
    shape = StateDrafterConfig.for_target(target.facts, **dimensions)
    drafter = StateDrafter.new(shape, shared)
    objective = ChainTraining(drafter, teacher, ChainSettings(), config.seed)
    return Trainee(drafter, objective, "least squares")


def _from(
    config: TrainingConfig, target: LoadedModel, shared: SharedWeights, teacher: TeacherLike
) -> Trainee:
    assert config.init is not None
    given = {"tli": config.tli, "paper": config.paper, "spacing": config.spacing, **config.shape}
    if refused := sorted(name for name, value in given.items() if value):
        raise UsageError(
            f"--init brings its own kind and shape, {refused[0].replace('_', ' ')} is not for it"
        )
    drafter = StateDrafter.load(config.init, target.facts, shared, torch.float32)
    drafter.requires_grad_(True)
    objective = GoesOn(drafter, teacher, ChainSettings(), config.seed)
    return Trainee(drafter, objective, digest(drafter))


class GoesOn(ChainTraining):
    """The same from a trained drafter: its weights are the start."""

    def start(self, rows: PackedRows) -> None:
        """Nothing is computed."""
