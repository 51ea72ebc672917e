"""What the kernels compute, in plain torch on a CPU, with the same interface, for tests of what is
above them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from moa.target.cuda.buffers import NODES, ForwardInput
from moa.target.pages import PAGE


class ReferenceKernels:
    """Dense, and as wide as the tensors that it is given: a float64 model is computed in float64."""

    in_fixed_order = False
    """The CPU's products order their sums by the number of tokens."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        wide = out.dtype if out.dtype == torch.float64 else torch.float32
        found = x.to(wide) @ weight.to(wide).T
        out.copy_(found if bias is None else found + bias.to(wide))

    def add_norm(
        self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        if more is not None:
            x.add_(more)
        out.copy_(_normed(x, weight, eps))

    def rotate_and_store(
        self,
        forward: ForwardInput,
        qkv: Tensor,
        rotary_table: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        heads = query.shape[1]
        kv_heads = keys.shape[1]
        width = query.shape[2]
        q, k, v = qkv.view(len(qkv), -1, width).split([heads, kv_heads, kv_heads], 1)
        if norms is not None:
            q = _normed(q, norms[0], eps)
            k = _normed(k, norms[1], eps)
        cos, sin = rotary_table[forward.positions.long()].unsqueeze(2).unbind(1)
        query.copy_(q * cos + q.roll(width // 2, -1) * sin)
        keys[forward.columns.long()] = (k * cos + k.roll(width // 2, -1) * sin).to(keys.dtype)
        values[forward.columns.long()] = v.to(values.dtype)

    def attend(
        self,
        forward: ForwardInput,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int,
        scale: float,
        parts: Tensor,
        sums: Tensor,
        out: Tensor,
    ) -> None:
        out.zero_()
        repeats = query.shape[1] // keys.shape[1]
        starts = forward.starts.tolist()
        for row, (start, stop) in enumerate(pairwise(starts)):
            if start == stop:
                continue
            length = int(forward.lengths[row])
            size = stop - start
            held = forward.table[row, : -(-(length + size) // PAGE)].long()
            columns = (held.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()[: length + size]
            if size > NODES:
                tree = torch.ones(size, size, dtype=torch.bool).tril()
            else:
                tree = (forward.masks[start:stop].unsqueeze(1) >> torch.arange(size)) & 1 == 1
            seen = torch.cat([torch.ones(size, length, dtype=torch.bool), tree], 1)
            mine = forward.positions[start:stop]
            if window:
                theirs = torch.cat([torch.arange(length), mine])
                seen &= mine.unsqueeze(1) - theirs < window
            k, v = (
                memory[columns].repeat_interleave(repeats, 1).to(query.dtype)
                for memory in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", query[start:stop], k) * scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:stop] = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)

    def gate(self, both: Tensor, out: Tensor) -> None:
        gate, up = both.chunk(2, -1)
        out.copy_(silu(gate) * up)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
