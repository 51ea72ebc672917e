"""The Triton kernels, in Triton's interpreter: equal to a float64 reference, and to themselves bit
for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moa.target.cuda.buffers import SPLIT, Buffers, ForwardInput, Tier, cut
from moa.target.pages import PagePool
from moa.target.rows import Row, RowBatch
from tests.target.cuda.reference import ReferenceKernels
from tests.target.trees import random_tree

pytest.importorskip("triton", reason="Triton comes for Linux on x86-64 alone")
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from moa.target.cuda.kernels import TritonKernels

KERNELS = TritonKernels(torch.device("cpu"))
REFERENCE = ReferenceKernels()
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy has no bfloat16, so that the interpreter multiplies its bits as integers; and its
    products of unlike sizes sum in unlike orders on some processors. In float64 the sum of a tile
    is the same in any order."""

    def wide(handle: TensorHandle) -> np.ndarray:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def dot(
        _: object, a: TensorHandle, b: TensorHandle, total: TensorHandle, *__: object
    ) -> TensorHandle:
        return TensorHandle((wide(a) @ wide(b)).astype(np.float32) + total.data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


class Attention:
    """A pool of one layer whose slots hold random keys and values on shuffled pages, and the
    queries of a batch."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        width: int,
        window: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heads = heads
        self.kv_heads = kv_heads
        self.width = width
        self.window = window
        self.dtype = dtype
        sizes = {
            "slots": len(lengths),
            "kv_heads": kv_heads,
            "capacity": 2 * SPLIT + 160,
            "head_dim": width,
        }
        self.pool = PagePool(layers=1, spare=1, dtype=dtype, **sizes)
        for _ in lengths:
            self.pool.acquire()
        generator = torch.Generator().manual_seed(0)
        everything = len(lengths), 2, self.pool.capacity
        self.known = torch.randn(*everything, kv_heads, width, generator=generator)
        self.queries = torch.randn(
            len(lengths), self.pool.capacity, heads, width, generator=generator
        )
        left = list(lengths)
        rng = np.random.default_rng(1)
        while any(left):  # page by page in a random order: no slot's pages are neighbours
            at = int(rng.choice(np.flatnonzero(left)))
            more = min(16, left[at])
            self.pool.begin([at], [more])
            self.pool.commit(at, range(more))
            left[at] -= more
        for slot, length in enumerate(lengths):
            self.write(slot, 0, length)

    def write(self, slot: int, start: int, stop: int) -> None:
        """Keys and values that depend on the slot and the position alone."""
        columns = torch.from_numpy(self.pool.columns(slot, np.arange(start, stop)))
        k, v = self.known[slot, :, start:stop].to(self.dtype)
        self.pool.k[0, columns], self.pool.v[0, columns] = k, v

    def forward(self, rows: Sequence[Row]) -> tuple[RowBatch, int, ForwardInput]:
        """The rows as a batch, the number of tokens that it is padded to, and what kernels get of
        it."""
        batch = RowBatch.of(rows, 1000)
        self.pool.begin(batch.slots, batch.sizes)
        buffers = Buffers(self.pool, self.heads // self.kv_heads)
        tier = Tier.of(len(rows), len(batch.ids), True)
        (pieces,) = cut(batch)
        buffers.fill(tier, batch, pieces, np.arange(0))
        return batch, tier.tokens, buffers.views(tier)

    def run(self, rows: Sequence[Row], kernels: Any = KERNELS) -> list[Tensor]:
        """The attention of each row's tokens; queries depend on the token's position in its slot
        alone."""
        batch, tokens, forward = self.forward(rows)
        spans = [slice(*span) for span in pairwise(batch.starts)]
        query = torch.zeros(tokens, self.heads, self.width, dtype=self.dtype)
        for slot, size, span in zip(batch.slots, batch.sizes, spans, strict=True):
            start = self.pool.lengths[slot]
            self.write(slot, start, start + size)
            query[span] = self.queries[slot, start : start + size]
        dtype = torch.float64 if kernels is REFERENCE else self.dtype
        splits = -(-self.pool.pages_per_slot * 16 // SPLIT)
        parts = torch.full((tokens, self.heads, splits, self.width), torch.nan)
        sums = torch.full((tokens, self.heads, splits, 2), torch.nan)
        out = torch.full((tokens, self.heads * self.width), torch.nan, dtype=dtype)
        seen = query.to(dtype), self.pool.k[0].to(dtype), self.pool.v[0].to(dtype)
        kernels.attend(forward, *seen, self.window, self.width**-0.5, parts, sums, out)
        return [out[span].float() for span in spans]


TREE = random_tree(np.random.default_rng(0), 17)


def chain(slot: int, size: int) -> Row:
    """Attention asks for no token's number."""
    return Row.chain(slot, [5] * size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "dtype"),
    [
        (4, 2, 96, 37, torch.float32),
        (7, 1, 16, 500, torch.float32),
        (4, 2, 64, 0, torch.float16),
        (4, 2, 64, 0, torch.bfloat16),
    ],
)
def test_attention_equals_the_reference(
    heads: int, kv_heads: int, width: int, window: int, dtype: torch.dtype
) -> None:
    """In low precision it is as near as the precision."""
    attention = Attention(
        [509, 20, 3], heads=heads, kv_heads=kv_heads, width=width, window=window, dtype=dtype
    )
    whole = dtype == torch.float32
    rows = [Row(0, *TREE), chain(1, 8), chain(2, 70)][: 3 if whole else 2]
    close = CLOSE if whole else dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(dtype).eps)
    for found, wanted in zip(attention.run(rows), attention.run(rows, REFERENCE), strict=True):
        torch.testing.assert_close(found, wanted, **close)


def test_a_tree_of_64_nodes_uses_every_bit() -> None:
    attention = Attention([30], heads=1, kv_heads=1, width=64)
    rows = [Row(0, *random_tree(np.random.default_rng(4), 64))]
    torch.testing.assert_close(attention.run(rows)[0], attention.run(rows, REFERENCE)[0], **CLOSE)


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (60, torch.bfloat16)])
def test_attention_has_the_same_bits_alone_in_a_crowd_and_with_any_draft(
    window: int, dtype: torch.dtype
) -> None:
    attention = Attention([506, 40, 0], heads=2, kv_heads=1, width=32, window=window, dtype=dtype)
    rows = [chain(0, 8), chain(1, 70), Row(2, *TREE)]
    for row, together in zip(rows, attention.run(rows), strict=True):
        assert torch.equal(attention.run([row])[0], together)
    (one,) = attention.run([chain(0, 1)])
    # The first token's state does not know of a draft behind it.
    assert torch.equal(attention.run([chain(0, 17)])[0][:1], one)


def test_a_prompt_whole_has_the_bits_of_a_prompt_in_eights() -> None:
    whole, pieces = (
        Attention([480], heads=2, kv_heads=1, width=32, window=100, dtype=torch.bfloat16)
        for _ in range(2)
    )
    (found,) = whole.run([chain(0, 72)])
    for start in range(0, 72, 8):
        (piece,) = pieces.run([chain(0, 8)])
        assert torch.equal(piece, found[start : start + 8])
        pieces.pool.commit(0, range(8))


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
)
def test_products_equal_the_reference_and_do_not_know_the_batch(
    dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(140, 200).to(dtype)
    weight = torch.randn(50, 200).to(dtype)
    added = torch.randn(50).to(dtype) if bias else None
    whole = torch.empty(140, 50)
    KERNELS.product(x, weight, added, whole)
    wanted = torch.empty(140, 50, dtype=torch.float64)
    REFERENCE.product(x.double(), weight.double(), added, wanted)
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-4, atol=1e-4)
    for start, stop in ((0, 8), (3, 19), (10, 74), (11, 140)):
        some = torch.empty(stop - start, 50)
        KERNELS.product(x[start:stop].contiguous(), weight, added, some)
        assert torch.equal(some, whole[start:stop])


@pytest.mark.parametrize(("heads", "norms", "width"), [((3, 1), False, 64), ((2, 2), True, 96)])
def test_small_kernels_equal_the_reference(heads: tuple[int, int], norms: bool, width: int) -> None:
    attention = Attention([5, 30], heads=heads[0] * heads[1], kv_heads=heads[1], width=width)
    _, tokens, forward = attention.forward([Row(0, *TREE), chain(1, 8)])
    torch.manual_seed(0)
    qkv = torch.randn(tokens, (heads[0] + 2) * heads[1] * width)
    rotary_table = torch.randn(100, 2, width)
    weights = (torch.rand(width), torch.rand(width)) if norms else None
    results = []
    both: Any = ((KERNELS, torch.float32), (REFERENCE, torch.float64))
    for kernels, dtype in both:
        query = torch.zeros(tokens, heads[0] * heads[1], width, dtype=dtype)
        keys = attention.pool.k[0].to(dtype).clone()
        values = attention.pool.v[0].to(dtype).clone()
        kernels.rotate_and_store(
            forward, qkv.to(dtype), rotary_table, weights, 1e-6, query, keys, values
        )
        x = qkv.to(dtype).clone()
        more = qkv.flip(1).to(dtype)
        out = torch.zeros_like(qkv, dtype=dtype)
        kernels.add_norm(x, more, rotary_table[0, 0].repeat(len(qkv[0]) // width), 1e-6, out)
        gated = torch.zeros(tokens, qkv.shape[1] // 2, dtype=dtype)
        kernels.gate(qkv.to(dtype), gated)
        spare = slice(attention.pool.pages * 16, None)
        keys[spare], values[spare] = 0, 0  # several tokens of padding write to one column
        results.append([one.float() for one in (query, keys, values, x, out, gated)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
