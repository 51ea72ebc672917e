from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from moa.model.shared import SharedWeights
from moa.training import losses
from moa.training.losses import LossKind, compare, divergence
from tests.close import assert_rounded

HALF = math.log(2)


@pytest.mark.parametrize(
    ("kind", "draft", "goal", "loss"),
    [
        ("kl", [0.5, 0.5], [0.5, 0.5], 0.0),
        ("kl", [0.5, 0.5], [1.0, 0.0], HALF),
        ("kl", [0.25, 0.75], [0.5, 0.5], 0.5 * math.log(4 / 3)),
        ("ce", [0.5, 0.5], [0.9, 0.1], HALF),
        ("ce", [0.25, 0.75], [0.1, 0.9], math.log(4 / 3)),
        ("tv", [0.25, 0.75], [0.5, 0.5], 0.25),
        ("tv", [1.0, 0.0], [0.0, 1.0], 1.0),
        ("lk", [0.5, 0.5], [0.5, 0.5], 0.0),
        ("lk", [0.5, 0.5], [1.0, 0.0], 0.5 + math.exp(-1.5) * (HALF - 0.5)),
    ],
)
def test_values_by_hand(kind: LossKind, draft: list[float], goal: list[float], loss: float) -> None:
    found, _ = divergence(
        torch.tensor([draft]).clamp(min=1e-30).log(), torch.tensor([goal]).clamp(min=1e-30).log(), kind
    )
    assert found.item() == pytest.approx(loss, abs=1e-6)


def _plain(mine: torch.Tensor, theirs: torch.Tensor, shared: SharedWeights, kind: LossKind) -> torch.Tensor:
    cap = shared.logit_softcap
    logits, goal = (F.linear(x, shared.head) for x in (mine, theirs))
    if cap is not None:
        logits, goal = torch.tanh(logits / cap) * cap, torch.tanh(goal / cap) * cap
    if kind == "ce":
        return F.cross_entropy(logits, goal.argmax(-1), reduction="none")
    if kind == "tv":
        return 0.5 * (logits.softmax(-1) - goal.softmax(-1)).abs().sum(-1)
    kl = F.kl_div(logits.log_softmax(-1), goal.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    if kind == "lk":
        apart = 0.5 * (logits.softmax(-1) - goal.softmax(-1)).abs().sum(-1)
        share = torch.exp(-3 * (1 - apart)).detach()
        return share * kl + (1 - share) * apart
    return kl


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("kind", ["kl", "ce", "tv", "lk"])
def test_value_and_gradient_are_autograds(kind: LossKind, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses._CHUNK, "cpu", 350)  # seven rows at a time: the last chunk is a short one
    torch.manual_seed(0)
    shared = SharedWeights(torch.randn(50, 16), torch.randn(50, 16), logit_softcap=cap)
    mine, theirs, weights = torch.randn(30, 16, requires_grad=True), torch.randn(30, 16), torch.rand(30)
    found = compare(mine, theirs, shared, shared, kind)
    wanted = _plain(mine, theirs, shared, kind)
    assert_rounded(found.loss, wanted)
    slopes = [torch.autograd.grad((loss * weights).sum(), mine)[0] for loss in (found.loss, wanted)]
    assert_rounded(*slopes)
    same = F.linear(mine, shared.head).argmax(-1) == F.linear(theirs, shared.head).argmax(-1)
    assert (found.agree.bool() == same).all()


def test_no_wanted_token_is_no_loss() -> None:
    shared = SharedWeights(torch.randn(5, 4), torch.randn(5, 4))
    mine = torch.zeros(0, 4, requires_grad=True)
    found = compare(mine, torch.zeros(0, 4), shared, shared, "kl")
    found.loss.sum().backward()
    assert found.loss.shape == found.agree.shape == (0,)


def test_heads_may_differ_and_be_padded_differently() -> None:
    """A body with a head of its own, of another width, under the same tokenizer."""
    torch.manual_seed(0)
    own, theirs = SharedWeights(torch.zeros(0), torch.randn(64, 8)), SharedWeights(torch.zeros(0), torch.randn(50, 16))
    x, y = torch.randn(30, 8, requires_grad=True), torch.randn(30, 16)
    found = compare(x, y, own, theirs, "kl")
    logits, goal = F.linear(x, own.head[:50]), F.linear(y, theirs.head)
    wanted = F.kl_div(logits.log_softmax(-1), goal.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    assert_rounded(found.loss, wanted)
    slopes = [torch.autograd.grad(loss.sum(), x)[0] for loss in (found.loss, wanted)]
    assert_rounded(*slopes)
