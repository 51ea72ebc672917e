"""Joined linear layers: layers with the same input become one product, in the fastest form for this
machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

Product = Callable[[Tensor], Tensor]

_ROWS_COMPARED = 1024
"""Rows of a weight that are compared at once with what 16 bits hold of them."""
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
    already_packed = {layer.whole for layer in layers if isinstance(layer, _Part)}
    if len(already_packed) == 1:
        # Another target of the same model has packed them, and made them parts of one product.
        return already_packed.pop()
    if not all(_is_plain(layer) for layer in layers):
        if len(layers) == 1:
            return layers[0]
        return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)
    weight, bias = join_weights(layers)
    if pack:
        return _packed(owner, names, weight, bias)
    if weight.device.type == "cpu" and weight.dtype != torch.float32:
        # torch gives these to oneDNN, too.
        return lambda x: _in_few_sizes(lambda rows: linear(rows, weight, bias), x)
    return lambda x: linear(x, weight, bias)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is an ordinary matrix, not a quantized one or another kind."""
    return type(layer) is nn.Linear and type(layer.weight.data) is Tensor


def _packed(owner: nn.Module, names: Sequence[str], weight: Tensor, bias: Tensor | None) -> Product:
    """The product of a joined weight, stored in oneDNN's layout. The layers `names` of `owner`
    become parts of it, so that there is no second copy of their weights."""
    packed = _Packed(weight, bias)
    if len(names) == 1:
        setattr(owner, names[0], packed)
        return packed
    start = 0
    for name in names:
        stop = start + getattr(owner, name).out_features
        setattr(owner, name, _Part(packed, start, stop))
        start = stop
    return packed


def join_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Put the weights of plain linear layers one above the other into one matrix, and their biases,
    if they have any, into one row; return both. The layers become views of the matrix."""
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.data for layer in layers])
    if len(layers) == 1:
        return layers[0].weight.data, bias
    weight = torch.cat([layer.weight.data for layer in layers])
    parts = weight.split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return weight, bias


def rotary_table(backbone: Any, embedding: Tensor, capacity: int) -> Tensor:
    """The rotary cosines and sines of all positions below `capacity`, `[capacity, 2, head_dim]`.

    A head is rotated as `x * cos + swapped(x) * sin`, with the halves of `x` swapped. The formula's
    minus before the second half is in the table: the sine of the first half is negative.
    """
    positions = torch.arange(capacity, device=embedding.device).unsqueeze(0)
    cos, sin = backbone.rotary_emb(embedding[:1], positions)
    first_half, second_half = sin[0].chunk(2, dim=-1)
    signed_sin = torch.cat([-first_half, second_half], dim=-1)
    return torch.stack([cos[0], signed_sin], dim=1)


def widened(weight: Tensor) -> Product | None:
    """A function that computes the LM head in float32, from a copy of its weight in oneDNN's layout;
    None where oneDNN cannot pack it, or for weights of another kind (quantized ones)."""
    if type(weight.data) is not Tensor or not can_pack(weight.device, torch.float32):
        return None
    packed = _Packed(weight.data.float(), None)
    return lambda x: packed(x.float())


def narrowed(weight: Tensor) -> Tensor | None:
    """A float32 weight in 16 bits, if every number stays what it is; None where one does not, and
    for weights of another precision."""
    if type(weight.data) is not Tensor or weight.dtype != torch.float32:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.detach().to(dtype)
        pieces = zip(weight.split(_ROWS_COMPARED), narrow.split(_ROWS_COMPARED), strict=True)
        if all(torch.equal(wide, half.float()) for wide, half in pieces):
            return narrow
    return None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN, the CPU's library of kernels, can store weights of this type in a layout of
    its own, and computes in this type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def rounded_up(tokens: int) -> int:
    """The number of tokens that a product of `tokens` tokens is computed for: at most an eighth
    more.

    oneDNN makes kernels for every number of tokens that it meets, half a megabyte a product, and
    never frees all of them. Here it meets 56 numbers up to `MOST_ROWS`: memory does not grow with
    the mixtures of drafts that clients send.
    """
    octave_end = 2 ** (tokens - 1).bit_length()  # the smallest power of two from `tokens` on
    octave_start = octave_end // 2
    step = max(1, octave_start // _SIZES_AN_OCTAVE)
    return math.ceil(tokens / step) * step


def sizes_up_to(tokens: int) -> list[int]:
    """All numbers of tokens that products of up to so many are computed for."""
    return sorted({rounded_up(number) for number in range(1, min(tokens, MOST_ROWS) + 1)})


def _in_few_sizes(product: Product, x: Tensor) -> Tensor:
    """Compute `product(x)` of states `[..., width]`, with padding up to one of a few numbers of
    tokens, and at most `MOST_ROWS` of them at once: oneDNN keeps kernels for every number that it
    meets."""
    rows = x.reshape(-1, x.shape[-1])
    tokens = len(rows)
    if tokens > MOST_ROWS:
        result = torch.cat([_in_few_sizes(product, part) for part in rows.split(MOST_ROWS)])
    elif padding := rounded_up(tokens) - tokens:
        result = product(pad(rows, (0, 0, 0, padding)))[:tokens]
    else:
        result = product(rows)
    return result.view(*x.shape[:-1], -1)


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
