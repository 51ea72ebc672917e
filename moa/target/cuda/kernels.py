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
_LOG2_E = 1.4426950408889634
"""Attention takes powers of 2 instead of e: scores are multiplied by this before."""
_HIDDEN = tl.constexpr(-1.0e30)
"""The score of a column that a token does not see. Infinity minus infinity would be no number."""
_PAGE = tl.constexpr(PAGE)
_SPLIT = tl.constexpr(SPLIT)
_STEP = tl.constexpr(_COLUMNS)


class TritonKernels:
    """The operations of a forward; results go to static tensors, and nothing is allocated."""

    def __init__(self, device: torch.device, *, library_products: bool = False) -> None:
        """Use these kernels on `device`. With `library_products` matrix products are left to
        torch's library: it is faster for more than 64 tokens, but its sums depend on the number of
        tokens."""
        self._library_products = library_products
        self.in_fixed_order = not library_products
        """Whether a token's sums run in the same order whatever else is computed with it."""
        self._shared_memory = 2**17
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self._shared_memory = properties.shared_memory_per_block_optin

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Compute `out[t,n] = x[t,k] @ weight[n,k].T + bias`, with sums in float32."""
        tokens, k = x.shape
        n = len(weight)
        if self._library_products and out.dtype == x.dtype:
            torch.mm(x, weight.T, out=out)
            if bias is not None:
                out += bias
            return
        rows, columns, warps = self._tile(tokens, n)
        # Bytes of shared memory that one stage of the pipeline loads: as many stages as fit, up to
        # 3.
        stage = (rows + columns) * _K * x.element_size()
        _product[(triton.cdiv(n, columns), triton.cdiv(tokens, rows))](
            x,
            weight,
            weight if bias is None else bias,  # a pointer is needed, even if it is not read
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
        """Add `more` to the states `x` `[tokens, width]` in place, if there is any, and write their
        RMS norm, multiplied by `weight`, to `out`."""
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
        rotary_table: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Split the product `qkv` `[tokens, heads, width]` into the heads of the queries, of the
        keys and of the values. Queries and keys are normed, in families that do so, and rotated by
        their positions. Queries are written to `query`, keys and values to the columns of the cache
        that the tokens have in this `forward`."""
        tokens, heads, width = query.shape
        kv_heads = keys.shape[1]
        # Without norms the kernel reads none, but takes a pointer for each.
        query_norm, key_norm = norms if norms is not None else (rotary_table, rotary_table)
        _rotate_and_store[(tokens, heads + 2 * kv_heads)](
            qkv,
            rotary_table,
            query_norm,
            key_norm,
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
        """Write the attention of `query` `[tokens, heads, width]` over the keys and values of each
        token's row to `out`.

        The columns of a row are cut into splits of `SPLIT`, which are computed side by side. Each
        leaves a part of the result in `parts`, and in `sums` its best score and the sum of its
        weights, by which a second kernel joins the parts of each token.
        """
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
            scale * _LOG2_E,
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
        """Compute SwiGLU's `silu(gate) * up` into `out`; a row of `both` is the gate, then up."""
        tokens, width = out.shape
        _gate[(tokens, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, num_warps=4)

    def _tile(self, tokens: int, n: int) -> tuple[int, int, int]:
        """The rows, columns and warps of the tile of outputs that one block of threads computes,
        for a product of so many tokens and n outputs. They may differ by the number of tokens:
        unlike `_K` they do not change the order in which an output is summed up."""
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
    """Compute one tile of ROWS x COLUMNS outputs; walks k from its beginning to its end by K."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a = tl.load(
            x + row[:, None] * k + inner[None, :],
            mask=(row[:, None] < tokens) & (inner[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            weight + column[None, :] * k + inner[:, None],
            mask=(column[None, :] < n) & (inner[:, None] < k),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    places = row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(
        out + places,
        total.to(out.dtype.element_ty),
        mask=(row[:, None] < tokens) & (column[None, :] < n),
    )


@triton.jit
def _add_norm(x, more, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the RMS norm of one token's state `x`, `width` numbers, to `out`. With `ADDS`, `more`
    is added to the state first. `BLOCK` is the next power of two from `width` on: Triton's blocks
    have such sizes."""
    token = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    inside = feature < width
    places = token * width + feature
    value = tl.load(x + places, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(more + places, mask=inside, other=0.0).to(tl.float32)
        # Rounded before the norm: it is the state that the next layer adds to.
        value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
        tl.store(x + places, value, mask=inside)
    wide = value.to(tl.float32)
    norm = tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    wide = wide / norm * tl.load(weight + feature, mask=inside, other=0.0)
    tl.store(out + places, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    rotary_table,
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
    """Norm, rotate and store one head of one token. A row of `qkv` has the heads of the queries, then
    of the keys, then of the values."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < WIDTH
    source = qkv + (token * (heads + 2 * kv_heads) + head) * WIDTH
    value = tl.load(source + feature, mask=inside, other=0.0)
    column = tl.load(columns + token).to(tl.int64)
    if head >= heads + kv_heads:
        value_head = head - heads - kv_heads
        place = (column * kv_heads + value_head) * WIDTH
        tl.store(values + place + feature, value, mask=inside)
    else:
        half = WIDTH // 2
        # A number is rotated together with the one half a head away.
        partner = tl.where(feature < half, feature + half, feature - half)
        wide = value.to(tl.float32)
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
            norm = query_norm
            if head >= heads:
                norm = key_norm
            wide = wide * scale * tl.load(norm + feature, mask=inside, other=0.0)
            other = other * scale * tl.load(norm + partner, mask=inside, other=0.0)
        # A position's cosines, then its sines with the sign of the rotation.
        cosines = rotary_table + tl.load(positions + token).to(tl.int64) * 2 * WIDTH
        rotated = wide * tl.load(cosines + feature, mask=inside, other=0.0)
        rotated += other * tl.load(cosines + WIDTH + feature, mask=inside, other=0.0)
        if head < heads:
            tl.store(
                query + (token * heads + head) * WIDTH + feature,
                rotated.to(query.dtype.element_ty),
                mask=inside,
            )
        else:
            key_head = head - heads
            place = (column * kv_heads + key_head) * WIDTH
            tl.store(keys + place + feature, rotated.to(keys.dtype.element_ty), mask=inside)


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
    """Attention of one block of a row's tokens, with the query heads that share one key head, over
    the columns of one split. It writes an unscaled part of the result for each token and head to
    `parts`, and the best score and the sum of the weights to `sums`; `_join` puts the parts together.

    Column c of a row is the c-th token of its text: first `length` committed ones, which all tokens
    see, then those of this forward, which see each other by the ancestor masks of a tree, or in
    order where the row has more tokens than a mask has bits.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(block_row + block)
    if row >= 0:
        first = tl.load(block_first + block)  # of the row's tokens in this block
        length = tl.load(lengths + row)
        start = tl.load(starts + row)
        size = tl.load(starts + row + 1) - start
        is_long = size > 64  # more tokens than a mask has bits
        # The last column and the lowest position of what this block looks at and from.
        end = length + size
        lowest = length
        if is_long:
            end = length + tl.minimum(first + TOKENS, size)
            lowest = length + first
        begin = split * _SPLIT
        if WINDOW > 0:  # columns that no token of the block sees would add zeros: skip them
            begin = tl.maximum(begin, (tl.maximum(lowest - WINDOW + 1, 0) // _STEP) * _STEP)
        stop = tl.minimum(end, (split + 1) * _SPLIT)
        if begin < stop:
            # The rows of the tile: for each token of the block, the heads that share the key head.
            lane = tl.arange(0, TOKENS * GROUP_BLOCK)
            node = first + lane // GROUP_BLOCK
            member = lane % GROUP_BLOCK
            is_real = (node < size) & (member < GROUP)
            head = kv_head * GROUP + member
            token = start + node
            feature = tl.arange(0, BLOCK)
            inside = feature < WIDTH
            q = tl.load(
                query + (token * HEADS + head)[:, None] * WIDTH + feature[None, :],
                mask=is_real[:, None] & inside[None, :],
                other=0.0,
            )
            mask = tl.load(masks + token, mask=is_real, other=0)
            position = tl.load(positions + token, mask=is_real, other=0)
            best_score = tl.full([TOKENS * GROUP_BLOCK], _HIDDEN, tl.float32)
            weight_sum = tl.zeros([TOKENS * GROUP_BLOCK], tl.float32)
            total = tl.zeros([TOKENS * GROUP_BLOCK, BLOCK], tl.float32)
            for left in range(begin, stop, _STEP):
                column = left + tl.arange(0, _STEP)
                held = column < stop
                page = tl.load(table + row * per_row + column // _PAGE, mask=held, other=0).to(
                    tl.int64
                )
                place = ((page * _PAGE + column % _PAGE) * KV_HEADS + kv_head) * WIDTH
                k = tl.load(
                    keys + place[None, :] + feature[:, None],
                    mask=held[None, :] & inside[:, None],
                    other=0.0,
                )
                scores = tl.dot(q, k, input_precision="ieee") * scale
                # Which of this forward's tokens a column is; negative for committed ones.
                node_column = column - length
                of_row = held & (node_column >= 0)
                bit_number = tl.minimum(tl.maximum(node_column, 0), 63).to(tl.int64)
                bit = (mask[:, None] >> bit_number[None, :]) & 1
                if is_long:
                    bit = (node_column[None, :] <= node[:, None]).to(tl.int64)
                seen = held[None, :] & ((node_column < 0)[None, :] | (bit == 1))
                if WINDOW > 0:
                    their_position = tl.load(positions + start + node_column, mask=of_row, other=0)
                    # A committed token's position is its column.
                    their_position = tl.where(of_row, their_position, column)
                    seen = seen & (position[:, None] - their_position[None, :] < WINDOW)
                scores = tl.where(seen, scores, _HIDDEN)
                new_best = tl.maximum(best_score, tl.max(scores, 1))
                weights = tl.where(seen, tl.exp2(scores - new_best[:, None]), 0.0)
                # What was summed so far is relative to the best score so far.
                shrink = tl.exp2(best_score - new_best)
                v = tl.load(
                    values + place[:, None] + feature[None, :],
                    mask=held[:, None] & inside[None, :],
                    other=0.0,
                )
                weight_sum = weight_sum * shrink + tl.sum(weights, 1)
                total = tl.dot(
                    weights.to(v.dtype), v, total * shrink[:, None], input_precision="ieee"
                )
                best_score = new_best
            part = (token * HEADS + head).to(tl.int64) * SPLITS + split
            tl.store(
                parts + part[:, None] * WIDTH + feature[None, :],
                total,
                mask=is_real[:, None] & inside[None, :],
            )
            tl.store(sums + 2 * part, best_score, mask=is_real)
            tl.store(sums + 2 * part + 1, weight_sum, mask=is_real)


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
    """Put together what `_attend` has left in `parts` and `sums` for one token and head, a part for
    each split of the columns. Each part was summed relative to its own best score, and is weighed
    by what that is against the best of all. A token without a row is padding, and gets zeros."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    row = tl.load(token_row + token)
    if row >= 0:
        length = tl.load(lengths + row)
        start = tl.load(starts + row)
        size = tl.load(starts + row + 1) - start
        end = length + size
        if size > 64:  # more tokens than a mask has bits: they see each other in order
            end = length + token - start + 1
        first = 0
        if WINDOW > 0:
            first = tl.maximum(tl.load(positions + token) - WINDOW + 1, 0) // _SPLIT
        last = (end - 1) // _SPLIT + 1
        base = (token * HEADS + head).to(tl.int64) * SPLITS
        best_score = _HIDDEN
        for split in range(first, last):
            best_score = tl.maximum(best_score, tl.load(sums + 2 * (base + split)))
        weight_sum = 0.0
        for split in range(first, last):
            share = tl.exp2(tl.load(sums + 2 * (base + split)) - best_score)
            weight_sum += share * tl.load(sums + 2 * (base + split) + 1)
            total += share * tl.load(
                parts + (base + split) * WIDTH + feature, mask=inside, other=0.0
            )
        total = total / weight_sum
    tl.store(
        out + (token * HEADS + head) * WIDTH + feature, total.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    """Compute `silu(gate) * up` for one token and BLOCK of its `width` numbers."""
    token = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < width
    gate = tl.load(both + token * 2 * width + feature, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * width + width + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * width + feature,
        (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty),
        mask=inside,
    )
