"""Both KV caches, of slots and of pages: what is kept, what the next user finds, and what there is
no room for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moa.errors import CapacityError, UsageError
from moa.model.slots import SlotPool
from moa.target.pages import PagePool

LAYERS = 3
HEADS = 2
WIDTH = 4
BOTH = pytest.mark.parametrize("kind", [SlotPool, PagePool])


def make_pool(kind: Any, slots: int = 4, capacity: int = 64) -> Any:
    return kind(layers=LAYERS, slots=slots, kv_heads=HEADS, capacity=capacity, head_dim=WIDTH)


def write(pool: Any, slot: int, count: int) -> Tensor:
    """Let one forward write `count` random tokens behind a slot's prefix; returns their keys and
    values `[2,layers,n,H,D]`."""
    rows = torch.randn(2, LAYERS, count, HEADS, WIDTH)
    pool.begin([slot], [count])
    start = pool.lengths[slot]
    if isinstance(pool, PagePool):
        where = torch.from_numpy(pool.columns(slot, np.arange(start, start + count)))
        pool.k[:, where], pool.v[:, where] = rows
    else:
        pool.k[:, slot, :, start : start + count], pool.v[:, slot, :, start : start + count] = (
            rows.transpose(2, 3)
        )
    return rows


def fill(pool: Any, slot: int, count: int) -> Tensor:
    """Add random tokens to the prefix."""
    if isinstance(pool, PagePool):
        rows = write(pool, slot, count)
        pool.commit(slot, range(count))
    else:
        rows = torch.randn(2, LAYERS, count, HEADS, WIDTH)
        pool.append(slot, *rows.transpose(2, 3))
    return rows


def held(pool: Any, slot: int) -> Tensor:
    """The prefix of a slot."""
    length = pool.lengths[slot]
    if isinstance(pool, PagePool):
        return torch.stack(pool.read(slot, 0, length))
    return torch.stack([pool.k[:, slot, :, :length], pool.v[:, slot, :, :length]]).transpose(2, 3)


@BOTH
def test_slots_run_out_with_a_typed_error_and_come_back(kind: Any) -> None:
    for size in ({"slots": 0}, {"capacity": 0}):
        with pytest.raises(UsageError, match="at least one slot"):
            make_pool(kind, **size)
    pool = make_pool(kind, slots=2)
    first = pool.acquire()
    second = pool.acquire()
    assert {first, second} == {0, 1}
    assert pool.free == 0
    with pytest.raises(CapacityError, match="all 2 slots"):
        pool.acquire()
    pool.release(second)
    for slot in (-1, second, 4):
        with pytest.raises(UsageError, match="not in use"):
            pool.release(slot)
    assert pool.acquire() == second


@BOTH
def test_a_prefix_grows_and_scratch_is_written_over(kind: Any) -> None:
    pool = make_pool(kind)
    slot = pool.acquire()
    first = fill(pool, slot, 14)
    write(pool, slot, 20)
    second = fill(pool, slot, 5)
    assert pool.lengths[slot] == 19
    assert torch.equal(held(pool, slot), torch.cat([first, second], 2))


@BOTH
def test_a_released_slot_is_zero_everywhere_even_behind_its_length(kind: Any) -> None:
    pool = make_pool(kind)
    kept = pool.acquire()
    slot = pool.acquire()
    fill(pool, kept, 5)
    fill(pool, slot, 4)
    write(pool, slot, 40)  # rejected drafts: scratch that no length covers
    before = held(pool, kept).clone()
    pool.release(slot)
    assert pool.lengths[slot] == 0
    assert torch.equal(held(pool, kept), before)
    pool.release(kept)
    assert not pool.k.any()
    assert not pool.v.any()


@BOTH
def test_a_forward_over_the_capacity_touches_nothing(kind: Any) -> None:
    pool = make_pool(kind, capacity=32)
    slot = pool.acquire()
    other = pool.acquire()
    before = fill(pool, slot, 30)
    with pytest.raises(
        CapacityError, match="holds 30 tokens and cannot take 3 more: its capacity is 32"
    ):
        pool.begin([other, slot], [1, 3])
    assert pool.lengths == [30 if one == slot else 0 for one in range(4)]
    assert torch.equal(held(pool, slot), before)
