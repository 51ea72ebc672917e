"""The kernels of the accelerator's decoder, in Triton, and their launches.

An output element is always the sum of the same numbers in the same order, whatever else is in the
batch: products walk K from its beginning to its end in steps of `_K`; attention sums over splits of
`SPLIT` columns at absolute places. So a token's state has the same bits alone, in a batch, with any
draft, and however a prompt was cut.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moa.target.cuda.buffers import SPLIT, ForwardInput, query_block
from moa.target.pages import PAGE

_K = 128
"""Step of all products; the same for every tile, for it is a part of the order of sums."""
_COLUMNS = 64
"""Columns of a step of attention."""
_WIDE = 8000
"""A product of more outputs has enough tiles for all of the card with larger ones."""
_HIDDEN = tl.constexpr(-1.0e30)
_PAGE = tl.constexpr(PAGE)
_SPLIT = tl.constexpr(SPLIT)
_STEP = tl.constexpr(_COLUMNS)


class TritonKernels:
    """The operations of a forward; results go to static tensors, and nothing is allocated."""

    def __init__(self, device: torch.device, *, library_products: bool = False) -> None:
        """`library_products` are faster for more than 64 tokens, but their sums depend on the
        number of tokens."""
        self._library_products = library_products
        self.in_fixed_order = not library_products
        """Whether a token's sums run in the same order whatever else is computed with it."""
        self._shared_memory = 2**17
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self._shared_memory = properties.shared_memory_per_block_optin

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`out[t,n] = x[t,k] @ weight[n,k].T + bias`."""
        tokens, k = x.shape
        n = len(weight)
        if self._library_products and out.dtype == x.dtype:
            torch.mm(x, weight.T, out=out)
            if bias is not None:
                out += bias
            return
        rows, columns, warps = self._tile(tokens, n)
        stage = (rows + columns) * _K * x.element_size()
        _product[(triton.cdiv(n, columns), triton.cdiv(tokens, rows))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            tokens,
            n,
            k,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            COLUMNS=columns,
            K=_K,
            num_warps=warps,
            num_stages=max(1, min(3, self._shared_memory // stage)),
        )

    def add_norm(
        self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """`x += more`, and `out` is its RMS norm."""
        tokens, width = x.shape
        _add_norm[(tokens,)](
            x,
            x if more is None else more,
            weight,
            out,
            width,
            eps,
            ADDS=more is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )

    def rotate_and_store(
        self,
        forward: ForwardInput[Tensor],
        qkv: Tensor,
        turns: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Norms of the heads, if any, and rotary embedding; queries go to `query`, keys and values
        to their columns."""
        tokens, heads, width = query.shape
        kv_heads = keys.shape[1]
        _rotate_and_store[(tokens, heads + 2 * kv_heads)](
            qkv,
            turns,
            *(norms if norms is not None else (turns, turns)),
            forward.positions,
            forward.columns,
            query,
            keys,
            values,
            heads,
            kv_heads,
            eps,
            NORMS=norms is not None,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )

    def attend(
        self,
        forward: ForwardInput[Tensor],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int,
        scale: float,
        parts: Tensor,
        sums: Tensor,
        out: Tensor,
    ) -> None:
        """Attention over the pages: a part for each split, then the parts of each token are joined."""
        tokens, heads, width = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        block = query_block(group)
        splits = parts.shape[2]
        common: dict[str, Any] = {
            "WINDOW": window,
            "SPLITS": splits,
            "WIDTH": width,
            "BLOCK": max(16, triton.next_power_of_2(width)),
        }
        _attend[(len(forward.block_row), kv_heads, splits)](
            query,
            keys,
            values,
            forward.table,
            forward.lengths,
            forward.starts,
            forward.positions,
            forward.masks,
            forward.block_row,
            forward.block_first,
            parts,
            sums,
            forward.table.shape[1],
            scale * 1.4426950408889634,
            HEADS=heads,
            KV_HEADS=kv_heads,
            TOKENS=block,
            GROUP=group,
            GROUP_BLOCK=triton.next_power_of_2(group),
            **common,
            num_warps=4,
            num_stages=2,
        )
        _join[(tokens, heads)](
            parts,
            sums,
            forward.token_row,
            forward.lengths,
            forward.starts,
            forward.positions,
            out,
            HEADS=heads,
            **common,
            num_warps=1,
        )

    def gate(self, both: Tensor, out: Tensor) -> None:
        """SwiGLU's `silu(gate) * up`."""
        tokens, width = out.shape
        _gate[(tokens, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, num_warps=4)

    def _tile(self, tokens: int, n: int) -> tuple[int, int, int]:
        """Rows, columns and warps; rows and columns are no part of the order of sums."""
        if tokens <= 16:
            return 16, 64 if n > _WIDE else 32, 4
        if tokens <= 64:
            return (64, 128, 8) if n > _WIDE else (64, 32, 4)
        return 128, 128, 8


@triton.jit
def _product(
    x,
    weight,
    bias,
    out,
    tokens,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, K):
        at = start + tl.arange(0, K)
        a = tl.load(
            x + row[:, None] * k + at[None, :],
            mask=(row[:, None] < tokens) & (at[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            weight + column[None, :] * k + at[:, None],
            mask=(column[None, :] < n) & (at[:, None] < k),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    where = row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(
        out + where,
        total.to(out.dtype.element_ty),
        mask=(row[:, None] < tokens) & (column[None, :] < n),
    )


@triton.jit
def _add_norm(x, more, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + token * width + at, mask=inside, other=0.0)
    if ADDS:
        value = (
            value.to(tl.float32)
            + tl.load(more + token * width + at, mask=inside, other=0.0).to(tl.float32)
        ).to(x.dtype.element_ty)
        tl.store(x + token * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = (
        wide
        / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
        * tl.load(weight + at, mask=inside, other=0.0)
    )
    tl.store(out + token * width + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    turns,
    query_norm,
    key_norm,
    positions,
    columns,
    query,
    keys,
    values,
    heads,
    kv_heads,
    eps,
    NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    source = qkv + (token * (heads + 2 * kv_heads) + head) * WIDTH
    value = tl.load(source + at, mask=inside, other=0.0)
    column = tl.load(columns + token).to(tl.int64)
    if head >= heads + kv_heads:
        place = (column * kv_heads + head - heads - kv_heads) * WIDTH
        tl.store(values + place + at, value, mask=inside)
    else:
        half = WIDTH // 2
        across = tl.where(at < half, at + half, at - half)
        wide = value.to(tl.float32)
        other = tl.load(source + across, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
            norm = query_norm
            if head >= heads:
                norm = key_norm
            wide = wide * scale * tl.load(norm + at, mask=inside, other=0.0)
            other = other * scale * tl.load(norm + across, mask=inside, other=0.0)
        turn = turns + tl.load(positions + token).to(tl.int64) * 2 * WIDTH
        turned = wide * tl.load(turn + at, mask=inside, other=0.0)
        turned += other * tl.load(turn + WIDTH + at, mask=inside, other=0.0)
        if head < heads:
            tl.store(
                query + (token * heads + head) * WIDTH + at,
                turned.to(query.dtype.element_ty),
                mask=inside,
            )
        else:
            place = (column * kv_heads + head - heads) * WIDTH
            tl.store(keys + place + at, turned.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    lengths,
    starts,
    positions,
    masks,
    block_row,
    block_first,
    parts,
    sums,
    per_row,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(block_row + block)
    if row >= 0:
        first = tl.load(block_first + block)
        length = tl.load(lengths + row)
        start = tl.load(starts + row)
        size = tl.load(starts + row + 1) - start
        causal = size > 64
        end = length + size
        lowest = length
        if causal:
            end = length + tl.minimum(first + TOKENS, size)
            lowest = length + first
        begin = split * _SPLIT
        if WINDOW > 0:  # what no token of the block sees would add zeros
            begin = tl.maximum(begin, (tl.maximum(lowest - WINDOW + 1, 0) // _STEP) * _STEP)
        stop = tl.minimum(end, (split + 1) * _SPLIT)
        if begin < stop:
            lane = tl.arange(0, TOKENS * GROUP_BLOCK)
            node = first + lane // GROUP_BLOCK
            member = lane % GROUP_BLOCK
            real = (node < size) & (member < GROUP)
            head = kv_head * GROUP + member
            token = start + node
            at = tl.arange(0, BLOCK)
            inside = at < WIDTH
            q = tl.load(
                query + (token * HEADS + head)[:, None] * WIDTH + at[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            mask = tl.load(masks + token, mask=real, other=0)
            position = tl.load(positions + token, mask=real, other=0)
            highest = tl.full([TOKENS * GROUP_BLOCK], _HIDDEN, tl.float32)
            weight = tl.zeros([TOKENS * GROUP_BLOCK], tl.float32)
            total = tl.zeros([TOKENS * GROUP_BLOCK, BLOCK], tl.float32)
            for left in range(begin, stop, _STEP):
                column = left + tl.arange(0, _STEP)
                held = column < stop
                page = tl.load(table + row * per_row + column // _PAGE, mask=held, other=0).to(
                    tl.int64
                )
                place = ((page * _PAGE + column % _PAGE) * KV_HEADS + kv_head) * WIDTH
                k = tl.load(
                    keys + place[None, :] + at[:, None],
                    mask=held[None, :] & inside[:, None],
                    other=0.0,
                )
                scores = tl.dot(q, k, input_precision="ieee") * scale
                other = column - length
                of_row = held & (other >= 0)
                bit = (
                    mask[:, None] >> tl.minimum(tl.maximum(other, 0), 63)[None, :].to(tl.int64)
                ) & 1
                if causal:
                    bit = (other[None, :] <= node[:, None]).to(tl.int64)
                seen = held[None, :] & ((other < 0)[None, :] | (bit == 1))
                if WINDOW > 0:
                    theirs = tl.load(positions + start + other, mask=of_row, other=0)
                    theirs = tl.where(of_row, theirs, column)
                    seen = seen & (position[:, None] - theirs[None, :] < WINDOW)
                scores = tl.where(seen, scores, _HIDDEN)
                higher = tl.maximum(highest, tl.max(scores, 1))
                shares = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
                shrink = tl.exp2(highest - higher)
                v = tl.load(
                    values + place[:, None] + at[None, :],
                    mask=held[:, None] & inside[None, :],
                    other=0.0,
                )
                weight = weight * shrink + tl.sum(shares, 1)
                total = tl.dot(
                    shares.to(v.dtype), v, total * shrink[:, None], input_precision="ieee"
                )
                highest = higher
            part = (token * HEADS + head).to(tl.int64) * SPLITS + split
            tl.store(
                parts + part[:, None] * WIDTH + at[None, :],
                total,
                mask=real[:, None] & inside[None, :],
            )
            tl.store(sums + 2 * part, highest, mask=real)
            tl.store(sums + 2 * part + 1, weight, mask=real)


@triton.jit
def _join(
    parts,
    sums,
    token_row,
    lengths,
    starts,
    positions,
    out,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    row = tl.load(token_row + token)
    if row >= 0:
        length = tl.load(lengths + row)
        start = tl.load(starts + row)
        size = tl.load(starts + row + 1) - start
        end = length + size
        if size > 64:
            end = length + token - start + 1
        first = 0
        if WINDOW > 0:
            first = tl.maximum(tl.load(positions + token) - WINDOW + 1, 0) // _SPLIT
        last = (end - 1) // _SPLIT + 1
        base = (token * HEADS + head).to(tl.int64) * SPLITS
        highest = _HIDDEN
        for split in range(first, last):
            highest = tl.maximum(highest, tl.load(sums + 2 * (base + split)))
        weight = 0.0
        for split in range(first, last):
            share = tl.exp2(tl.load(sums + 2 * (base + split)) - highest)
            weight += share * tl.load(sums + 2 * (base + split) + 1)
            total += share * tl.load(parts + (base + split) * WIDTH + at, mask=inside, other=0.0)
        total = total / weight
    tl.store(out + (token * HEADS + head) * WIDTH + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both + token * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * width + at,
        (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty),
        mask=inside,
    )
