"""Masks of a batch against the plainest definition: the prefix and the ancestors, within the window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moa.model.layout import Layout
from moa.model.pages import PAGE, PagePool
from moa.model.rows import Row, RowBatch
from tests.model.trees import path_to, random_tree

HIDDEN = torch.finfo(torch.float32).min
WINDOWS = {"all": None, "short": 3, "wider": 20, "wide": 1000}


def layout_of(lengths: list[int], rows: list[tuple[list[int], list[int]]], **how: object) -> tuple[Layout, PagePool]:
    pool = PagePool(layers=1, slots=len(rows), kv_heads=2, capacity=8192, head_dim=4)
    for length in lengths:
        slot = pool.acquire()
        if length:
            pool.begin([slot], [length])
            pool.commit(slot, range(length))
    batch = RowBatch.of([Row(slot, *row) for slot, row in enumerate(rows)], 128)
    pool.begin(batch.slots, batch.sizes)
    return Layout(batch, pool, windows=WINDOWS, repeats=2, **how), pool


@pytest.mark.parametrize("together", [False, True])
def test_masks_show_the_prefix_and_the_ancestors_within_the_window(together: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = [0, 40, 5, 17, 700]
    rows = [random_tree(rng, size) for size in (9, 1, 4, 12, 6)]
    chain = [7, 8, 9], [-1, 0, 1]
    layout, pool = layout_of([*lengths, 30], [*rows, chain], together=together)
    rows.append(chain)
    lengths.append(30)
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in rows)])
    seen = set()
    for group in layout.groups:
        tokens = np.arange(starts[-1])[group.tokens if isinstance(group.tokens, slice) else group.tokens.numpy()]
        picks = tokens if group.picks is None else group.picks.numpy()
        assert len(picks) == group.rows * group.width
        real = range(len(picks)) if group.real is None else group.real.tolist()
        for token, place in zip(tokens, real, strict=True):
            assert picks[place] == token
            b = int(np.searchsorted(starts, token, side="right")) - 1
            path = [lengths[b] + node for node in path_to(rows[b][1], token - starts[b])]
            order = [*range(lengths[b]), *path]  # columns in the order of their positions
            assert layout.positions[token] == len(order) - 1
            for kind, window in WINDOWS.items():
                mask, at = group.masks[kind], divmod(place, group.width)
                expected = torch.full((group.view,), HIDDEN)
                expected[order[-window:] if window else order] = 0.0
                for repeat in range(2):
                    found = torch.zeros(group.view) if mask is None else mask[at[0], 0, repeat * group.width + at[1]]
                    assert torch.equal(found, expected)
            seen.add(int(token))
        memory = torch.arange(pool.pages * PAGE).repeat(4, 2, 1).permute(2, 1, 0).contiguous()
        for place, row in enumerate(group.read(memory)[:, 0, :, 0]):
            b = int(np.searchsorted(starts, picks[place * group.width], side="right")) - 1
            held = lengths[b] + len(rows[b][0])
            assert row[:held].tolist() == pool.columns(b, np.arange(held)).tolist()
    assert seen == set(range(starts[-1]))


def test_every_token_has_a_column_of_its_own() -> None:
    layout, pool = layout_of([3, 20], [([5] * 30, list(range(-1, 29))), ([6, 7], [-1, 0])])
    expected = [*pool.columns(0, np.arange(3, 33)), *pool.columns(1, np.arange(20, 22))]
    assert layout.columns.tolist() == expected


def test_long_rows_attend_alone_and_short_ones_with_their_like() -> None:
    chains = [([5] * size, list(range(-1, size - 1))) for size in (1, 8, 8, 7, 60)]
    layout, _ = layout_of([4000, 30, 20, 25, 10], chains)
    assert sorted((group.rows, group.width) for group in layout.groups) == [(1, 1), (1, 60), (3, 8)]
    alone = next(group for group in layout.groups if group.width == 1)
    assert alone.masks["all"] is None, "a single token that is read in place sees all there is"
