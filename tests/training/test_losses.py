from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moa.model.borrowed import SharedWeights
from moa.training import losses
from moa.training.losses import compare
from testing.close import assert_rounded


def pair(case: str) -> tuple[SharedWeights, SharedWeights]:
    """The heads of drafter and target."""
    if case == "own":  # of another width, under the same tokenizer, and padded differently
        return SharedWeights(torch.zeros(0), torch.randn(64, 16)), SharedWeights(
            torch.zeros(0), torch.randn(50, 8)
        )
    shared = SharedWeights(
        torch.randn(50, 16), torch.randn(50, 16), logit_softcap=5.0 if case == "capped" else None
    )
    return shared, shared


@pytest.mark.parametrize("heads", ["shared", "capped", "own"])
def test_value_and_gradient_are_autograds(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        losses._CHUNK, "cpu", 350
    )  # seven rows at a time: the last chunk is a short one
    torch.manual_seed(0)
    own, their = pair(heads)
    mine = torch.randn(30, 16, requires_grad=True)
    theirs = torch.randn(30, their.head.shape[1])
    weights = torch.rand(30)
    found = compare(mine, theirs, own, their)
    size = min(len(own.head), len(their.head))
    cap = own.logit_softcap
    logits = F.linear(mine, own.head[:size])
    goal = F.linear(theirs, their.head[:size])
    assert (found.agree.bool() == (logits.argmax(-1) == goal.argmax(-1))).all()
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
        goal = torch.tanh(goal / cap) * cap
    wanted = F.kl_div(
        logits.log_softmax(-1), goal.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert_rounded(found.loss, wanted)
    slopes = [torch.autograd.grad((loss * weights).sum(), mine)[0] for loss in (found.loss, wanted)]
    assert_rounded(*slopes)


def test_no_wanted_token_is_no_loss() -> None:
    shared = SharedWeights(torch.randn(5, 4), torch.randn(5, 4))
    mine = torch.zeros(0, 4, requires_grad=True)
    found = compare(mine, torch.zeros(0, 4), shared, shared)
    found.loss.sum().backward()
    assert found.loss.shape == found.agree.shape == (0,)
