"""Products in oneDNN's layout: what they compute, and for how many numbers of tokens oneDNN is
asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from moa.target import products
from moa.target.products import can_pack, joined, rounded_up

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32),
    reason="torch without oneDNN's packed products",
)


def test_a_product_is_asked_for_few_numbers_of_tokens_whatever_clients_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN holds kernels for every number that it has met: 2,048 of them took more than a
    gigabyte."""
    met: set[tuple[int, ...]] = set()
    real = torch.ops.mkldnn._linear_pointwise

    def spy(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        met.add(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    product = joined(
        layers := nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 3)}),
        list(layers),
        pack=True,
    )
    with torch.inference_mode():
        for tokens in range(1, 2049):
            assert product(torch.ones(tokens, 8)).shape == (tokens, 7)
            assert layers["one"](torch.ones(1, tokens, 8)).shape == (1, tokens, 4)
    assert len(met) == 56
    sizes: set[int] = set()  # torch itself gives a product in bfloat16 to oneDNN
    monkeypatch.setattr(
        products, "linear", lambda x, *rest: (sizes.add(len(x)), linear(x, *rest))[1]
    )
    half = joined(
        nn.ModuleDict({"one": nn.Linear(8, 4, dtype=torch.bfloat16)}), ["one"], pack=False
    )
    with torch.inference_mode():
        for tokens in range(1, 257):
            assert half(torch.ones(tokens, 8, dtype=torch.bfloat16)).shape == (tokens, 4)
    assert len(sizes) == 48


def test_at_most_an_eighth_is_added_and_nothing_to_small_drafts() -> None:
    assert [rounded_up(tokens) for tokens in range(1, 17)] == list(range(1, 17))
    assert all(tokens <= rounded_up(tokens) <= 1.125 * tokens for tokens in range(1, 10_000))


@pytest.mark.parametrize("shape", [(1, 8), (17, 8), (1, 33, 8), (3, 11, 8), (1, 1100, 8)])
def test_what_is_added_alters_no_row(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(8, 5)
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().clone()
    product = joined(nn.ModuleDict({"one": layer}), ["one"], pack=True)
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(product(x), linear(x, weight, bias))
