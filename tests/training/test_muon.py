"""Our Muon is torch's, except for the precision of its products."""

from __future__ import annotations

import pytest
import torch

from moa.training.muon import Muon


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_of_the_library(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    library = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizers = Muon([ours], lr=0.02, weight_decay=0.1, dtype=dtype), library
    start = ours.detach().clone()
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(shape)
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours - start).norm()
    # bfloat16 keeps 8 bits of each of five rounds of products.
    assert (ours - theirs).norm() <= (0.0 if dtype == torch.bfloat16 else 0.03) * moved
