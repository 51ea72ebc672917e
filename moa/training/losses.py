"""The losses of distillation through frozen heads, in chunks of logits.

Logits take most of the memory in training a drafter: four times the vocabulary for each row. Heads are frozen and each
row's loss is independent, so a row's gradient is computed together with its loss, and the logits of a chunk are freed.
So memory does not grow with the vocabulary, and it is faster, because a chunk fits the caches.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moa.model.shared import SharedWeights
from moa.training.loop import Loss

LossKind = Literal["kl", "ce", "tv", "lk"]

_CHUNK = {"cpu": 2**19, "cuda": 2**26}
"""Logits per chunk: on a CPU as many as fit a core's cache, on a GPU enough to keep it busy."""


class Compared(NamedTuple):
    """Per position: the loss, whether drafter and target choose the same token (0 or 1), and the probability that a
    sampled draft is accepted, where it was asked for."""

    loss: Tensor
    agree: Tensor
    overlap: Tensor | None = None

    def summed(self, weights: Tensor | None = None) -> Loss:
        """The weighted sum over all positions; without weights each counts 1."""
        weights = torch.ones_like(self.loss) if weights is None else weights
        return Loss((self.loss * weights).sum(), weights.sum(), {"agree": (self.agree * weights).sum()})


def compare(
    mine: Tensor,
    theirs: Tensor,
    head: SharedWeights,
    their_head: SharedWeights,
    kind: LossKind,
    *,
    overlaps: bool = False,
) -> Compared:
    """Distillation loss of the drafter's final states `[N, H]` against the target's, through their heads; has a
    gradient. With `overlaps`, also how much of its probability a draft shares with the target."""
    loss, agree, overlap = _ThroughHead.apply(mine, theirs, head, their_head, kind, overlaps)
    return Compared(loss, agree, overlap if overlaps else None)


def divergence(logits: Tensor, goal: Tensor, kind: LossKind) -> tuple[Tensor, Tensor]:
    """The loss of every row of `logits` against the target's, `goal`, and its gradient by `logits`; both in float32."""
    draft = F.log_softmax(logits, -1)
    if kind == "ce":
        choice = goal.argmax(-1, keepdim=True)
        loss = -draft.gather(-1, choice).squeeze(-1)
        return loss, draft.exp_().scatter_add_(-1, choice, torch.full_like(loss, -1.0).unsqueeze(-1))
    if kind == "kl":
        target = F.log_softmax(goal, -1)
        likely = target.exp()
        loss = target.sub_(draft).mul_(likely).sum(-1)
        return loss, draft.exp_().sub_(likely)
    likely = goal.softmax(-1)
    said = draft.exp()
    off = said - likely
    slope = off.sign().mul_(0.5)
    apart, by_logits = 0.5 * off.abs().sum(-1), said * (slope - (said * slope).sum(-1, keepdim=True))
    if kind == "tv":
        return apart, by_logits
    # Total variation is the goal, but has almost no gradient while the two hardly overlap, so KL is used there.
    share = torch.exp(-3 * (1 - apart)).unsqueeze(-1)
    entropy = (likely * (likely.clamp(min=1e-30).log() - draft)).sum(-1)
    return torch.lerp(apart, entropy, share.squeeze(-1)), torch.lerp(by_logits, off, share)


class _ThroughHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, theirs: Tensor, own: SharedWeights, their: SharedWeights, kind: LossKind, overlaps: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = mine.device.type
        lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else their.head.dtype
        # Tables of one vocabulary may be padded differently.
        size = min(len(own.head), len(their.head))
        head, goal_head, cap = own.head[:size].to(lower), their.head[:size].to(lower), own.logit_softcap
        count = len(mine)
        rows = max(1, min(count, _CHUNK.get(device, _CHUNK["cuda"]) // size))
        losses, agreed, shared, gradients = [], [], [], []
        # The last chunk is as large as the others: a CPU's bf16 kernels keep memory for every shape.
        missing = -count % rows
        mine, theirs = F.pad(mine, (0, 0, 0, missing)), F.pad(theirs, (0, 0, 0, missing))
        with torch.autocast(device, enabled=False):
            for x, y in zip(mine.detach().to(lower).split(rows), theirs.to(lower).split(rows), strict=True):
                logits, goal = F.linear(x, head).float(), F.linear(y, goal_head).float()
                logits, goal = _capped(logits, cap), _capped(goal, their.logit_softcap)
                agreed.append(logits.argmax(-1) == goal.argmax(-1))
                if overlaps:
                    shared.append(torch.minimum(logits.softmax(-1), goal.softmax(-1)).sum(-1))
                raised = 0.0 if own.bias is None else own.bias
                loss, slope = divergence(logits + raised, goal + raised, kind)
                losses.append(loss)
                if ctx.needs_input_grad[0]:
                    if cap is not None:
                        slope = slope * (1 - (logits / cap) ** 2)
                    gradients.append(slope.to(lower) @ head)
        none = mine.new_zeros(0, dtype=torch.float32)
        agree = torch.cat(agreed)[:count].float() if agreed else none
        overlap = torch.cat(shared)[:count] if shared else none.clone()
        ctx.mark_non_differentiable(agree, overlap)
        ctx.dtype = mine.dtype
        ctx.save_for_backward(torch.cat(gradients)[:count] if gradients else torch.zeros_like(mine[:count]))
        return torch.cat(losses)[:count] if losses else none.clone(), agree, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, each: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * each.unsqueeze(-1)).to(ctx.dtype), None, None, None, None, None


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else torch.tanh(logits / cap) * cap
