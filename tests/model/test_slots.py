"""The slot pool: what a forward writes, what a commit keeps, and what the next user of a slot finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moa.errors import CapacityError, UsageError
from moa.model.slots import SlotPool

LAYERS, HEADS, WIDTH = 3, 2, 4


def make_pool(slots: int = 4, capacity: int = 16) -> SlotPool:
    return SlotPool(layers=LAYERS, slots=slots, kv_heads=HEADS, capacity=capacity, head_dim=WIDTH)


def write(pool: SlotPool, slot: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Write `nodes` random columns behind a slot's prefix; returns them, `[layers,H,nodes,D]`."""
    k, v = torch.randn(2, LAYERS, HEADS, nodes, WIDTH)
    pool.begin([slot], [nodes])
    start = pool.lengths[slot]
    pool.k[:, slot, :, start : start + nodes] = k
    pool.v[:, slot, :, start : start + nodes] = v
    return k, v


def test_slots_run_out_with_a_typed_error_and_come_back() -> None:
    pool = make_pool(slots=2)
    first, second = pool.acquire(), pool.acquire()
    assert {first, second} == {0, 1}
    assert pool.free == 0
    with pytest.raises(CapacityError, match="all 2 slots"):
        pool.acquire()
    pool.release(second)
    assert pool.acquire() == second


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_only_a_slot_in_use_can_be_released(slot: int) -> None:
    with pytest.raises(UsageError, match="not in use"):
        make_pool().release(slot)


def test_a_pool_needs_room() -> None:
    for size in ({"slots": 0}, {"capacity": 0}):
        with pytest.raises(UsageError, match="at least one slot"):
            make_pool(**size)


def test_a_released_slot_is_zero_everywhere_even_behind_its_length() -> None:
    pool = make_pool()
    kept, slot = pool.acquire(), pool.acquire()
    write(pool, kept, 5)
    write(pool, slot, 4)
    pool.commit(slot, [0, 2])
    write(pool, slot, 9)  # rejected drafts: scratch that no length covers
    before = pool.k[:, kept].clone()
    pool.release(slot)
    assert pool.lengths[slot] == 0
    assert not pool.k[:, slot].any()
    assert not pool.v[:, slot].any()
    assert torch.equal(pool.k[:, kept], before)


def test_commit_compacts_the_path_behind_the_prefix() -> None:
    pool = make_pool()
    slot = pool.acquire()
    k1, v1 = write(pool, slot, 3)
    pool.commit(slot, [0, 1, 2])
    k2, v2 = write(pool, slot, 6)
    k, v = pool.commit(slot, [0, 3, 5])
    assert pool.lengths[slot] == 6
    assert torch.equal(k, k2[:, :, [0, 3, 5]].transpose(1, 2))
    assert torch.equal(v, v2[:, :, [0, 3, 5]].transpose(1, 2))
    assert torch.equal(pool.k[:, slot, :, :6], torch.cat([k1, k2[:, :, [0, 3, 5]]], dim=2))
    assert torch.equal(pool.v[:, slot, :, :6], torch.cat([v1, v2[:, :, [0, 3, 5]]], dim=2))


def test_a_forward_over_the_capacity_touches_nothing() -> None:
    pool = make_pool(capacity=8)
    slot, other = pool.acquire(), pool.acquire()
    write(pool, slot, 6)
    pool.commit(slot, range(6))
    versions = list(pool.versions)
    with pytest.raises(CapacityError, match="holds 6 tokens and cannot take 3 more: its capacity is 8"):
        pool.begin([other, slot], [1, 3])
    assert pool.versions == versions
