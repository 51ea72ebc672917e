"""The losses of distillation, through the target's frozen head, a few rows of logits at a time.

Logits are what training a drafter holds most of: a row is as wide as the vocabulary, four times over. Since the head
is frozen and every row's loss is its own, the gradient of a row is known as soon as its loss is, so no logits outlive
their chunk. That keeps memory flat for a vocabulary of any size, and is faster, as a chunk fits the caches.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moa.model.shared import SharedWeights

LossKind = Literal["kl", "ce", "tv"]

_CHUNK = {"cpu": 2**19, "cuda": 2**26}
"""Logits at a time: what a core's cache holds; on a GPU, what keeps it busy."""


class Compared(NamedTuple):
    """Per position: the loss, and whether drafter and target would say the same (0 or 1)."""

    loss: Tensor
    agree: Tensor


def compare(mine: Tensor, theirs: Tensor, shared: SharedWeights, kind: LossKind) -> Compared:
    """How far the drafter's final states `[N, H]` are from the target's, as the head reads both; has a gradient."""
    loss, agree = _ThroughHead.apply(mine, theirs, shared, kind)
    return Compared(loss, agree)


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
    draft = draft.exp_()
    off = draft - goal.softmax(-1)
    slope = off.sign().mul_(0.5)
    return 0.5 * off.abs_().sum(-1), draft * (slope - (draft * slope).sum(-1, keepdim=True))


class _ThroughHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, theirs: Tensor, shared: SharedWeights, kind: LossKind) -> tuple[Tensor, Tensor]:
        device = mine.device.type
        lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else shared.head.dtype
        head, cap = shared.head.to(lower), shared.logit_softcap
        rows = max(1, _CHUNK.get(device, _CHUNK["cuda"]) // len(head))
        losses, agreed, gradients = [], [], []
        with torch.autocast(device, enabled=False):
            for x, y in zip(mine.detach().to(lower).split(rows), theirs.to(lower).split(rows), strict=True):
                logits, goal = F.linear(x, head).float(), F.linear(y, head).float()
                if cap is not None:
                    logits, goal = torch.tanh(logits / cap) * cap, torch.tanh(goal / cap) * cap
                agreed.append(logits.argmax(-1) == goal.argmax(-1))
                loss, slope = divergence(logits, goal, kind)
                losses.append(loss)
                if ctx.needs_input_grad[0]:
                    if cap is not None:
                        slope = slope * (1 - (logits / cap) ** 2)
                    gradients.append(slope.to(lower) @ head)
        agree = torch.cat(agreed).float() if agreed else mine.new_zeros(0, dtype=torch.float32)
        ctx.mark_non_differentiable(agree)
        ctx.dtype = mine.dtype
        ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(mine))
        return torch.cat(losses) if losses else mine.new_zeros(0, dtype=torch.float32), agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, each: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * each.unsqueeze(-1)).to(ctx.dtype), None, None, None
