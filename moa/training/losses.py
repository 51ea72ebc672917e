"""What a drafter is compared with: the target's distribution, through both heads, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moa.errors import ConfigError
from moa.model.borrowed import SharedWeights
from moa.training.data import Batch, PackedRows
from moa.training.loop import Loss
from moa.training.teacher import TeacherOutput

_CHUNK = {"cpu": 2**19, "cuda": 2**26}
"""Logits per chunk: on a CPU as many as fit a core's cache, on a GPU enough to keep it busy."""


class Compared(NamedTuple):
    """Per position: the loss, and whether drafter and target choose the same token (0 or 1)."""

    loss: Tensor
    agree: Tensor

    def summed(self) -> Loss:
        """The sum over all positions."""
        return Loss(self.loss.sum(), torch.ones_like(self.loss).sum(), {"agree": self.agree.sum()})


def compare(
    mine: Tensor, theirs: Tensor, head: SharedWeights, their_head: SharedWeights
) -> Compared:
    """The KL from the target's final states `[N, H]` to the drafter's, through their heads; has a
    gradient."""
    return Compared(*_ThroughHead.apply(mine, theirs, head, their_head))


def divergence(logits: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || draft) of every row of `logits` to the target's, `goal`, and its gradient by
    `logits`; both in float32. In place, for these are the largest tensors of a training."""
    draft_logprobs = F.log_softmax(logits, -1)
    target_logprobs = F.log_softmax(goal, -1)
    target = target_logprobs.exp()
    loss = target_logprobs.sub_(draft_logprobs).mul_(target).sum(-1)
    gradient = draft_logprobs.exp_().sub_(target)
    return loss, gradient


def _chunks(states: Tensor, rows: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Final states `[N, H]` in chunks of so many rows. The last one is padded: a CPU's bf16 kernels
    keep memory for every shape."""
    padding = -len(states) % rows
    return F.pad(states, (0, 0, 0, padding)).to(dtype).split(rows)


class _Heads(NamedTuple):
    """The heads of drafter and target, as far as both have rows: tables of one vocabulary may be
    padded differently."""

    own: Tensor
    """`[V, H]`."""
    their: Tensor
    own_cap: float | None
    their_cap: float | None
    bias: Tensor | float
    """Added to the logits of both."""
    own_scale: float
    """By which the drafter's states have been multiplied."""

    @classmethod
    def of(cls, own: SharedWeights, their: SharedWeights, dtype: torch.dtype) -> _Heads:
        """These heads, in this precision."""
        size = min(len(own.head), len(their.head))
        return cls(
            own=own.head[:size].to(dtype),
            their=their.head[:size].to(dtype),
            own_cap=own.logit_softcap,
            their_cap=their.logit_softcap,
            bias=0.0 if own.bias is None else own.bias,
            own_scale=own.logit_scale,
        )

    def compare(self, mine: Tensor, theirs: Tensor, *, with_gradient: bool) -> _Chunk:
        """Compare the rows of a chunk `[n, H]`, the drafter's and the target's."""
        logits = _capped(F.linear(mine, self.own).float(), self.own_cap)
        goal = _capped(F.linear(theirs, self.their).float(), self.their_cap)
        agree = logits.argmax(-1) == goal.argmax(-1)
        loss, gradient = divergence(logits + self.bias, goal + self.bias)
        if not with_gradient:
            return _Chunk(loss, agree, None)
        if self.own_cap is not None:
            gradient = gradient * (1 - (logits / self.own_cap) ** 2)  # the slope of the cap
        return _Chunk(loss, agree, gradient.to(mine.dtype) @ self.own * self.own_scale)


class _Chunk(NamedTuple):
    """What some rows of final states give, `[n, ...]` each."""

    loss: Tensor
    agree: Tensor
    """Whether both choose the same token."""
    gradient: Tensor | None
    """Of each row's loss, by the drafter's state before it was scaled; None where none is wanted."""


class _ThroughHead(torch.autograd.Function):
    """Logits take most of the memory in training a drafter: four times the vocabulary for each row.
    Heads are frozen and each row's loss is independent, so a row's gradient is computed together
    with its loss, and the logits of a chunk are freed: memory does not grow with the vocabulary,
    and a chunk fits the caches."""

    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, theirs: Tensor, own: SharedWeights, their: SharedWeights
    ) -> tuple[Tensor, Tensor]:
        """The loss `[N]` of each row of final states, the drafter's (`mine`) and the target's
        (`theirs`) `[N, H]`; and whether both choose the same token there (0 or 1). The gradient by
        `mine` is computed at once, and kept for `backward`."""
        device = mine.device.type
        ctx.dtype = mine.dtype
        count = len(mine)
        if count == 0:
            return _nothing_to_learn(ctx, mine)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else their.head.dtype
        heads = _Heads.of(own, their, dtype)
        rows = max(1, min(count, _CHUNK.get(device, _CHUNK["cuda"]) // len(heads.own)))
        my_chunks = _chunks(mine.detach() * own.logit_scale, rows, dtype)
        their_chunks = _chunks(theirs * their.logit_scale, rows, dtype)
        with torch.autocast(device, enabled=False):
            results = [
                heads.compare(my_rows, their_rows, with_gradient=ctx.needs_input_grad[0])
                for my_rows, their_rows in zip(my_chunks, their_chunks, strict=True)
            ]
        # Without the padding behind the last chunk.
        loss = torch.cat([chunk.loss for chunk in results])[:count]
        agree = torch.cat([chunk.agree for chunk in results])[:count].float()
        ctx.mark_non_differentiable(agree)
        gradients = [chunk.gradient for chunk in results if chunk.gradient is not None]
        if gradients:
            ctx.save_for_backward(torch.cat(gradients)[:count])
        return loss, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient by `mine`, from that by each row's loss."""
        (gradient,) = ctx.saved_tensors
        by_mine = gradient.float() * of_loss.unsqueeze(-1)
        return by_mine.to(ctx.dtype), None, None, None


def _nothing_to_learn(ctx: Any, mine: Tensor) -> tuple[Tensor, Tensor]:
    """The results of a batch without a token to learn, `[0]` each."""
    loss = mine.new_zeros(0, dtype=torch.float32)
    agree = loss.clone()
    ctx.mark_non_differentiable(agree)
    ctx.save_for_backward(torch.zeros_like(mine))
    return loss, agree


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """The logits of a model with a soft cap."""
    if cap is None:
        return logits
    return torch.tanh(logits / cap) * cap


def wanted_places(batch: Batch) -> Tensor:
    """A flag for each token of a batch, `[B, L]`: whether the prediction after it is learnt. It is
    not after a document's last token, nor where the next token belongs to a prompt."""
    segments = torch.from_numpy(batch.segments)
    next_is_wanted = torch.from_numpy(batch.wanted)[:, 1:]
    next_is_in_document = segments[:, 1:] == segments[:, :-1]
    return F.pad(next_is_wanted & next_is_in_document, (0, 1))


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a token's loss is made of."""

    loss_weight: float = 1.0
    """Weight of KL(target || draft)."""
    feature_weight: float = 0.0
    """Weight of smooth-L1 between the drafter's and the target's final states (the paper: 1, beside
    0.1 of KL)."""

    def __post_init__(self) -> None:
        weights = (self.loss_weight, self.feature_weight)
        if min(weights) < 0 or sum(weights) == 0:
            raise ConfigError("the weights of the losses must not be negative, and not all zero")


class TeacherLike(Protocol):
    """Where an objective has the target's results from: the target itself, or files."""

    shared: SharedWeights

    def tap(self, layers: Sequence[int]) -> None:
        """Results have the inputs of these layers too."""

    def __call__(self, batch: Batch) -> TeacherOutput:
        """The results for a batch."""


class TeacherObjective:
    """What training a drafter beside its frozen teacher has in common: an `Objective` of the loop
    whose `loss` a kind of drafter defines."""

    gradient_checkpointing = False
    """Whether activations are recomputed for their gradients: less memory, more time."""

    def __init__(
        self, drafter: Any, teacher: TeacherLike, settings: LossSettings, seed: int = 0
    ) -> None:
        """Train `drafter`, with the target's results from `teacher`."""
        self.module = drafter.train()
        self.teacher = teacher
        self.settings: Any = settings
        self.seed = seed
        self.part_of_head: Callable[[Batch, int], tuple[SharedWeights, SharedWeights]] | None = None
        """For each step a part of the drafter's and of the target's head, where they are compared
        over a part only."""

    def start(self, rows: PackedRows) -> None:
        """Set the weights that can be computed before the first step, if there are any."""

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The loss of one batch."""
        raise NotImplementedError

    def _heads(self, batch: Batch, step: int) -> tuple[SharedWeights, SharedWeights]:
        """The heads of drafter and target to compare through."""
        if self.part_of_head is None:
            return self.module.shared, self.teacher.shared
        return self.part_of_head(batch, step)

    def _compare(
        self, mine: Tensor, theirs: Tensor, heads: tuple[SharedWeights, SharedWeights]
    ) -> Compared:
        """The weighted loss of each row of final states, the drafter's (`mine`) and the target's
        (`theirs`), `[N, H]` each: of their distributions through the heads, and, if the settings
        say so, of the distance between the states themselves."""
        settings = self.settings
        own_head, their_head = heads
        compared = compare(mine, theirs, own_head, their_head)
        loss = settings.loss_weight * compared.loss
        if settings.feature_weight:
            distance = F.smooth_l1_loss(mine.float(), theirs.float(), reduction="none").mean(-1)
            loss = loss + settings.feature_weight * distance
        return compared._replace(loss=loss)
