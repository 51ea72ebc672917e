"""The paged KV cache: what is written, kept and shared, and that released pages are zeroed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moa.errors import CapacityError, UsageError
from moa.process.memory import resident_bytes
from moa.target.pages import PAGE, PagePool
from tests.model.test_slots import HEADS, LAYERS, WIDTH, fill, held, write


def make_pool(slots: int = 4, capacity: int = 6 * PAGE, tokens: int = 0) -> PagePool:
    return PagePool(
        layers=LAYERS, slots=slots, kv_heads=HEADS, capacity=capacity, head_dim=WIDTH, tokens=tokens
    )


def test_a_sequence_takes_the_pages_that_it_needs() -> None:
    with pytest.raises(UsageError, match="a KV cache"):
        make_pool(tokens=-1)
    pool = make_pool(tokens=10 * PAGE)
    slot = pool.acquire()
    assert pool.free_pages == 10
    fill(pool, slot, PAGE + 1)
    assert pool.free_pages == 8
    fill(pool, slot, PAGE - 1)
    assert pool.free_pages == 8
    pool.release(slot)
    assert pool.free_pages == 10


def test_full_memory_is_a_typed_error_that_takes_nothing() -> None:
    pool = make_pool(tokens=8 * PAGE)
    first = pool.acquire()
    second = pool.acquire()
    fill(pool, first, 6 * PAGE)
    with pytest.raises(
        CapacityError, match="3 more pages of 16 tokens are needed, 2 of 8 are free"
    ):
        pool.begin([second], [3 * PAGE])
    assert (pool.free_pages, pool.pages_held[second], pool.versions[second]) == (2, 0, 0)
    with pytest.raises(CapacityError, match=f"cannot take 1 more: its capacity is {6 * PAGE}"):
        pool.begin([first], [1])


def test_commit_compacts_the_path_behind_the_prefix() -> None:
    pool = make_pool()
    slot = pool.acquire()
    before = fill(pool, slot, PAGE - 2)
    tree = write(pool, slot, 6)  # across the border of two pages
    pool.commit(slot, [0, 3, 5])
    assert pool.lengths[slot] == PAGE + 1
    assert torch.equal(held(pool, slot), torch.cat([before, tree[:, :, [0, 3, 5]]], 2))


@pytest.mark.parametrize("share", [1, PAGE - 1, PAGE, 2 * PAGE, 2 * PAGE + 3])
def test_a_shared_beginning_is_the_same_pages_and_outlives_its_source(share: int) -> None:
    pool = make_pool()
    source = pool.acquire()
    rows = fill(pool, source, 2 * PAGE + 5)
    free = pool.free_pages
    slot = pool.share(source, share)
    assert free - pool.free_pages == (1 if share % PAGE else 0), (
        "only what ends within a page is copied"
    )
    own = fill(pool, slot, 4)
    others = fill(pool, source, 7)
    pool.release(source)
    assert torch.equal(held(pool, slot), torch.cat([rows[:, :, :share], own], 2))
    pool.release(slot)
    assert pool.free_pages == pool.pages
    assert not pool.k.any()
    assert others.any()


def test_sharing_needs_a_source_that_holds_so_much_and_leaves_no_slot_behind_when_it_fails() -> (
    None
):
    pool = make_pool(tokens=6 * PAGE)
    source = pool.acquire()
    fill(pool, source, 5 * PAGE + 3)
    with pytest.raises(UsageError, match="cannot share"):
        pool.share(source, 6 * PAGE)
    with pytest.raises(CapacityError, match="memory is full"):
        pool.share(source, PAGE + 1)
    assert pool.free == 3
    pool.release(source)
    assert pool.free_pages == 6


def test_crowded_sequences_are_read_in_order_wherever_their_pages_lie_and_others_lie_straight() -> (
    None
):
    roomy = make_pool()
    slots = [roomy.acquire() for _ in range(4)]
    for slot in slots * 6:
        fill(roomy, slot, PAGE)
    assert all(roomy.contiguous)
    assert roomy.free_pages == 0
    pool = make_pool(slots=8, tokens=20 * PAGE)
    rng = np.random.default_rng(0)
    texts: dict[int, Tensor] = {}
    for _ in range(300):
        slot = int(rng.integers(0, 8))
        if slot not in texts and pool.free:
            slot = pool.acquire()
            texts[slot] = torch.zeros(2, LAYERS, 0, HEADS, WIDTH)
        elif slot in texts and (rng.random() < 0.1 or pool.lengths[slot] > 5 * PAGE):
            pool.release(slot)
            del texts[slot]
            continue
        count = int(rng.integers(1, 20))
        fits = (
            -(-count // PAGE) + 1 <= pool.free_pages and pool.lengths[slot] + count <= pool.capacity
        )
        if slot in texts and fits:
            texts[slot] = torch.cat([texts[slot], fill(pool, slot, count)], 2)
        for one, text in texts.items():
            assert torch.equal(held(pool, one), text)
    assert not all(pool.contiguous), "it was crowded"


def test_memory_is_taken_as_it_is_used() -> None:
    before = resident_bytes()
    pool = PagePool(
        layers=4, slots=1, kv_heads=2, capacity=2**19, head_dim=64, dtype=torch.bfloat16
    )
    assert pool.nbytes > 10**9
    assert resident_bytes() - before < 50e6
    slot = pool.acquire()
    pool.begin([slot], [64 * PAGE])
    pool.k[:, : 64 * PAGE] = 1
    assert float(pool.read(slot, 0, 8)[0].float().sum()) == 4 * 8 * 2 * 64
    assert resident_bytes() - before < 100e6
