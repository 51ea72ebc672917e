from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moa.model.blocks import Attention, RMSNorm
from tests.close import assert_rounded


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_the_norm_trains_as_torchs_own_would(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, gradient = torch.randn(5, 7, 64, dtype=dtype, requires_grad=True), torch.randn(5, 7, 64, dtype=dtype)
    found = []
    for training in (True, False):
        norm.train(training)
        y = norm(x)
        found.append((y, *torch.autograd.grad(y, (x, norm.weight), gradient)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_attention_over_layers_is_attention(kv_heads: int, tokens: int) -> None:
    torch.manual_seed(0)
    attention = Attention(128, 8, kv_heads)
    query = torch.randn(tokens, 8, 9, 16)
    key, value = torch.randn(tokens, kv_heads, 9, 16), torch.randn(tokens, kv_heads, 9, 16)
    plain = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    plain = attention.o_proj(plain.transpose(-3, -2).flatten(-2))
    assert_rounded(attention.attend(query, key, value, None), plain)
