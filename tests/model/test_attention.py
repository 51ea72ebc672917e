"""Tree attention against the plainest definitions of the same things."""

from __future__ import annotations

import pytest
import torch

from moa.model.attention import ATTENTION, tree_sdpa
from tests.close import assert_rounded
from tests.model.trees import reference
from tests.tiny import FAMILIES, tiny

HIDDEN = torch.finfo(torch.float32).min


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("repeated", [True, False])
def test_grouped_attention_equals_attention_with_repeated_keys(
    softcap: float | None, kv_heads: int, repeated: bool
) -> None:
    torch.manual_seed(0)
    batch, heads, length, width, view = 2, 4, 5, 8, 11
    groups = heads // kv_heads
    query = torch.randn(batch, length, heads, width).transpose(1, 2)
    key, value = torch.randn(2, batch, kv_heads, view, width)
    mask = torch.zeros(batch, 1, length, view).masked_fill_(torch.rand(batch, 1, length, view) < 0.5, HIDDEN)
    mask[..., 0] = 0.0
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = (scores + mask).softmax(-1) @ value.repeat_interleave(groups, 1)
    given = mask.repeat(1, 1, groups, 1) if repeated else mask
    out, _ = tree_sdpa(torch.nn.Module(), query, key, value, given, scaling=0.3, softcap=softcap)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_fully_hidden_row_stays_finite() -> None:
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    for softcap in (None, 2.0):
        out, _ = tree_sdpa(torch.nn.Module(), query, key, value, torch.full((1, 1, 4, 4), HIDDEN), softcap=softcap)
        assert out.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_this_attention_still_runs_plainly(family: str) -> None:
    model = tiny(family)
    model.set_attn_implementation(ATTENTION)
    ids = torch.arange(4, 34).reshape(2, 15)
    with torch.no_grad():
        assert_rounded(model(ids).logits, reference(family)(ids).logits)
