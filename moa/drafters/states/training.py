"""Trains drafters of features as they draft: along chains of their own outputs.

Every token is predicted from the target's states before it; then, from one anchor in every `length`
tokens, a chain reads its own outputs (EAGLE-3's training-time test). A chain's tokens count
`length` times: in expectation that is the loss of chains from every token, and seven steps cost two
forwards in place of seven. Every second step's chains are `late` tokens long, for states that come
late; and a drafter that goes on without any learns the whole text from its own outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from moa.training.losses import (
    Compared,
    LossSettings,
    TeacherLike,
    TeacherObjective,
    wanted_places,
)
from moa.training.masks import causal
from moa.training.teacher import TeacherOutput


@dataclass(frozen=True, kw_only=True)
class ChainSettings(LossSettings):
    """Losses, and the chains."""

    length: int = 7
    """Tokens of a chain."""
    late: int = 16
    """Tokens of the chains of every second step."""
    decay: float = 1.0
    """The k-th token of a chain counts decay ** k. EAGLE-3's authors: 0.8."""
    absent: float = 4.0
    """What a token counts that is predicted without any state of the target; 0: such tokens are not
    learnt."""


class _Text(NamedTuple):
    """The tokens of a batch, `[B, L]` each."""

    ids: Tensor
    positions: Tensor
    """Of each token in its document."""
    segments: Tensor
    """The document of each token; 0: padding."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> _Text:
        """Those of a batch, on this device."""
        arrays = (batch.ids, batch.positions, batch.segments)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


class _Predicted(NamedTuple):
    """What the drafter predicts at n tokens."""

    states: Tensor
    """`[n, hidden]`: the drafter's guess of the target's final states."""
    goals: Tensor
    """`[n, hidden]`: these final states."""
    weight: float
    """How many tokens each of these counts for."""


class ChainTraining(TeacherObjective):
    """The objective of drafters of features."""

    settings: ChainSettings

    def __init__(
        self, model: Any, teacher: TeacherLike, settings: ChainSettings, seed: int = 0
    ) -> None:
        super().__init__(model, teacher, settings, seed)
        teacher.tap(model.config.taps)

    def start(self, rows: PackedRows) -> None:
        """Set the drafter's maps to the least-squares solution."""
        solve(self.module, self.teacher, rows)

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The weighted sum of the losses of all tokens, of the whole text and of the chains, the
        drafts of several tokens in a row. Metrics are how often the drafter agrees with the target:
        at the first token, at later ones of a chain, and where it knows no state of the target."""
        known = self.teacher(batch)
        text = _Text.of(batch, known.hidden.device)
        wanted = wanted_places(batch).to(known.hidden.device)
        first, *later = self._along_chains(text, known, wanted, step)
        groups = {"agree": [first], "agree_later": later}
        if self.settings.absent:
            groups["agree_absent"] = [self._without_states(text, known, wanted)]
        compared, counts = self._compare_all(groups, self._heads(batch, step))
        weight = counts.sum()
        metrics = {}
        start = 0
        for name, group in groups.items():
            stop = start + sum(len(part.states) for part in group)
            agree = compared.agree[start:stop]
            mean = agree.mean() if len(agree) else weight.new_zeros(())
            metrics[name] = mean * weight  # the loop divides metrics by the weight
            start = stop
        return Loss((compared.loss * counts).sum(), weight, metrics)

    def _along_chains(
        self, text: _Text, known: TeacherOutput, wanted: Tensor, step: int
    ) -> Iterator[_Predicted]:
        """Yield what the drafter predicts at the tokens that are `wanted`: first at each of them
        after the target's own feature, then along chains of its own outputs."""
        model: Any = self.module
        settings = self.settings
        random = np.random.default_rng([self.seed, step])  # in every process the same
        length = settings.late if random.random() < 0.5 else settings.length
        start = int(random.integers(length))
        features = shifted(model.read(known.states), text.positions)
        for lag, hidden, places, valid in chains(model, *text, features, start, length):
            chosen = wanted.gather(1, places) & valid
            every_number = places.unsqueeze(-1).expand(*places.shape, known.hidden.shape[-1])
            goals = known.hidden.gather(1, every_number)
            # A chain begins at one token in `length`, so that its tokens count for as many.
            weight = settings.decay**lag * length if lag else 1.0
            yield _Predicted(hidden[chosen], goals[chosen], weight)

    def _without_states(self, text: _Text, known: TeacherOutput, wanted: Tensor) -> _Predicted:
        """What the drafter predicts at the tokens that are `wanted` where it knows no state of the
        target."""
        hidden = absent(self.module, *text)
        return _Predicted(hidden[wanted], known.hidden[wanted], self.settings.absent)

    def _compare_all(
        self,
        groups: Mapping[str, Sequence[_Predicted]],
        heads: tuple[SharedWeights, SharedWeights],
    ) -> tuple[Compared, Tensor]:
        """Compare all that was predicted with the target, in the order of the groups. Returns the
        results by token, and what each token counts."""
        parts = [part for group in groups.values() for part in group]
        states = torch.cat([part.states for part in parts])
        goals = torch.cat([part.goals for part in parts])
        counts = []
        for part in parts:
            counts.append(torch.full((len(part.states),), part.weight, device=states.device))
        return self._compare(states, goals, heads), torch.cat(counts)


def shifted(features: Tensor, positions: Tensor) -> Tensor:
    """Features `[B, L, H]` moved by one place: that of the token before each, zeros at the first of
    a document."""
    before = torch.cat([torch.zeros_like(features[:, :1]), features[:, :-1]], dim=1)
    return before * (positions > 0).unsqueeze(-1).to(features.dtype)


def visible(model: Any, positions: Tensor, segments: Tensor) -> Tensor:
    """The attention mask `[B, L, L]` of a text whose features are all the target's: a token sees
    itself and those before it in its document. The first token of a document has no feature before
    it, so others see it only if the model reads such tokens (`reads_first`)."""
    before_or_itself = causal(segments)
    if model.reads_first:
        return before_or_itself
    itself = torch.eye(segments.shape[1], dtype=torch.bool, device=segments.device)
    has_feature = (positions > 0).unsqueeze(1)
    return before_or_itself & (has_feature | itself)


def chains(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    segments: Tensor,
    features: Tensor,
    start: int,
    length: int,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Run the model over a batch as it drafts. Yields, step by step: how far the tokens are along
    their chain (0: not in any), the states that are predicted at them, their indices in the rows of
    the batch, and which of them are valid.

    The first step is over all tokens, each after the target's own feature. The later ones go along
    chains, which begin at the tokens `start`, `start + length`, ... of each row and read what they
    predict themselves.
    """
    rows, size = ids.shape
    index = torch.arange(size, device=ids.device)
    sees = visible(model, positions, segments)
    hidden, past = model.step(
        ids, features, positions, additive(sees).unsqueeze(1), model.empty_rows(ids)
    )
    yield 0, hidden, index.expand(rows, -1), torch.ones_like(ids, dtype=torch.bool)
    anchors = index[start : size - 1 : length]
    is_usable = segments[:, anchors] > 0  # not padding
    if not model.reads_first:
        is_usable &= positions[:, anchors] > 0
    for lag, states in drafted(model, ids, positions, sees, hidden, past, anchors, length):
        places = (anchors + lag).clamp(max=size - 1)
        is_in_row = anchors + lag < size
        is_in_document = segments[:, places] == segments[:, anchors]
        yield lag, states, places.expand(rows, -1), is_usable & is_in_row & is_in_document


def absent(model: Any, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
    """The states `[B, L, hidden]` that the drafter predicts where it knows none of the target's.

    On the device each token then reads the feature that the model made at the token before it, one
    after another. Two passes over all tokens at once come close: the first reads zeros, the second
    what the first one made.
    """
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
    """Yield, step by step, how far the chains have come and the states `[B, anchors, hidden]` that
    are predicted there.

    A chain begins at each of the `anchors`, indices of tokens, and goes along the text. It reads
    its own predictions as features; it attends over the keys and values of the text up to its
    anchor (`visible`, `past`), and over those that it has made itself.
    """
    keys, values = past
    sees_true_rows = visible[:, anchors]
    # Each step adds a row for every chain, of which a chain sees its own alone.
    itself = torch.eye(len(anchors), dtype=torch.bool, device=ids.device)
    sees_own_row = itself.expand(len(ids), -1, -1)
    states = hidden[:, anchors]
    for lag in range(1, length):
        places = (anchors + lag).clamp(max=ids.shape[1] - 1)
        sees = torch.cat([sees_true_rows, *[sees_own_row] * lag], -1)
        states, (key, value) = model.step(
            ids[:, places],
            model.feedback(states),
            positions[:, places],
            additive(sees).unsqueeze(1),
            (keys, values),
        )
        keys = torch.cat([keys, key], -2)
        values = torch.cat([values, value], -2)
        yield lag, states


_DIMENSIONS = {
    "num_attention_heads": "num_attention_heads",
    "self_attention_intermediate_size": "intermediate_size",
    "self_attention_num_key_value_heads": "num_key_value_heads",
}
"""Dimensions of the one layer, by the names that all drafters share."""


def trainee(config: TrainingConfig, target: LoadedModel, teacher: TeacherLike) -> Trainee:
    """The drafter to be trained and its objective: a new one, which starts as a least-squares
    solution, or that of `config.init`."""
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
    """The drafter in the folder `config.init`, to be trained on from its weights, and its
    objective. A `UsageError` if flags ask for another shape than it has."""
    assert config.init is not None
    given = {"tli": config.tli, "paper": config.paper, "spacing": config.spacing, **config.shape}
    refused = sorted(name for name, value in given.items() if value)
    if refused:
        raise UsageError(
            f"--init brings its own kind and shape, {refused[0].replace('_', ' ')} is not for it"
        )
    drafter = StateDrafter.load(config.init, target.facts, shared, torch.float32)
    drafter.requires_grad_(True)
    objective = GoesOn(drafter, teacher, ChainSettings(), config.seed)
    return Trainee(drafter, objective, digest(drafter))


class GoesOn(ChainTraining):
    """Chain training from a trained drafter: its weights are the start."""

    def start(self, rows: PackedRows) -> None:
        """Keep the weights as they are."""
