"""Joined linear layers: layers with the same input become one product, in the fastest form for this
machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

Product = Callable[[Tensor], Tensor]

_ROWS_HINT = 16
"""oneDNN packs weights for about this many tokens; measured, one packing serves 1 to 256."""
_SIZES_AN_OCTAVE = 8
"""Numbers of tokens, between one power of two and the next, for which oneDNN makes kernels."""
MOST_ROWS = 512
"""Products of more tokens are computed in pieces: kernels for 513 to 2,048 tokens would take 71 MB,
which came slowly, as drafts of many sessions met in one forward."""


def joined(owner: nn.Module, names: Sequence[str], *, pack: bool) -> Product:
    """One product that computes the linear layers `names` of `owner` together.

    Their weights are stored once: the layers become views of the joined weight, or, with `pack`,
    parts of a weight in oneDNN's own layout, which is about twice as fast for 2 to 32 tokens on a
    CPU. Layers that are not plain matrices (quantized ones) run one by one.
    """
    layers = [getattr(owner, name) for name in names]
    if len(wholes := {layer.whole for layer in layers if isinstance(layer, _Part)}) == 1:
        return wholes.pop()  # another target has already packed this model's weights
    if not all(type(layer) is nn.Linear and type(layer.weight.data) is Tensor for layer in layers):
        return (
            layers[0]
            if len(layers) == 1
            else lambda x: torch.cat([layer(x) for layer in layers], dim=-1)
        )
    weight, bias = join_weights(layers)
    if pack:
        stops = [0, *accumulate(layer.out_features for layer in layers)]
        packed = _Packed(weight, bias)
        for name, start, stop in zip(names, stops, stops[1:], strict=False):
            setattr(owner, name, packed if len(names) == 1 else _Part(packed, start, stop))
        return packed
    if weight.device.type == "cpu" and weight.dtype != torch.float32:  # torch gives these to oneDNN
        return lambda x: _in_few_sizes(lambda rows: linear(rows, weight, bias), x)
    return lambda x: linear(x, weight, bias)


def join_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights and biases of plain layers in one matrix each; the layers become views of it."""
    bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
    if len(layers) == 1:
        return layers[0].weight.data, bias
    weight = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(
        layers, weight.split([layer.out_features for layer in layers]), strict=True
    ):
        layer.weight.data = part
    return weight, bias


def turns(backbone: Any, embedding: Tensor, capacity: int) -> Tensor:
    """Rotary cosines and sines of positions below `capacity`, `[capacity, 2, head_dim]`. A rotation
    adds the swapped halves times the sine, so the first half's sign is flipped."""
    positions = torch.arange(capacity, device=embedding.device).unsqueeze(0)
    cos, sin = backbone.rotary_emb(embedding[:1], positions)
    half = sin.shape[-1] // 2
    return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)


def widened(weight: Tensor) -> Product | None:
    """The LM head's product in float32, from a copy in oneDNN's layout; None where oneDNN cannot,
    or for weights of another kind (quantized ones)."""
    if type(weight.data) is not Tensor or not can_pack(weight.device, torch.float32):
        return None
    packed = _Packed(weight.data.float(), None)
    return lambda x: packed(x.float())


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack such weights, and computes in them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ours = dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return ours and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def rounded_up(tokens: int) -> int:
    """The number of tokens that a product of `tokens` tokens is computed for: at most an eighth
    more.

    oneDNN makes kernels for every number of tokens that it meets, half a megabyte a product, and
    never frees all of them. Here it meets 56 numbers up to `MOST_ROWS`: memory does not grow with
    the mixtures of drafts that clients send.
    """
    step = max(1, 2 ** (tokens - 1).bit_length() // (2 * _SIZES_AN_OCTAVE))
    return -(-tokens // step) * step


def sizes_up_to(tokens: int) -> list[int]:
    """All numbers of tokens that products of up to so many are computed for."""
    return sorted({rounded_up(number) for number in range(1, min(tokens, MOST_ROWS) + 1)})


def _in_few_sizes(product: Product, x: Tensor) -> Tensor:
    """`product(x)`, computed for `rounded_up` tokens, at most `MOST_ROWS` at once."""
    rows = x.reshape(-1, x.shape[-1])
    tokens = len(rows)
    if tokens > MOST_ROWS:
        made = torch.cat([_in_few_sizes(product, part) for part in rows.split(MOST_ROWS)])
    elif more := rounded_up(tokens) - tokens:
        made = product(pad(rows, (0, 0, 0, more)))[:tokens]
    else:
        made = product(rows)
    return made.view(*x.shape[:-1], -1)


class _Packed(nn.Module):
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return _in_few_sizes(self._product, x)

    def _product(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")


class _Part(nn.Module):
    """One layer of a joined product, for the library's own model."""

    def __init__(self, whole: _Packed, start: int, stop: int) -> None:
        super().__init__()
        self.whole = whole
        self._start = start
        self._stop = stop

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self._start : self._stop]
