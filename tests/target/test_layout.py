"""Which rows of a batch are attended together. What they see is compared with plain forwards:
`test_target`, of sliding windows too, and `test_packed`, of unlike rows."""

from __future__ import annotations

from moa.target.layout import Layout
from moa.target.pages import PagePool
from moa.target.rows import Row, RowBatch


def test_long_rows_attend_alone_and_short_ones_with_their_like() -> None:
    lengths = (4000, 30, 20, 25, 10)
    sizes = (1, 8, 8, 7, 60)
    pool = PagePool(layers=1, slots=5, kv_heads=2, capacity=8192, head_dim=4)
    for length in lengths:
        slot = pool.acquire()
        pool.begin([slot], [length])
        pool.commit(slot, range(length))
    batch = RowBatch.of([Row.chain(slot, [5] * size) for slot, size in enumerate(sizes)], 128)
    pool.begin(batch.slots, batch.sizes)
    layout = Layout(batch, pool, windows={"all": None}, repeats=2)
    assert sorted((group.rows, group.width) for group in layout.groups) == [(1, 1), (1, 60), (3, 8)]
    alone = next(group for group in layout.groups if group.width == 1)
    assert alone.masks["all"] is None, "a single token that is read in place sees all there is"
