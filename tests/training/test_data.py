from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moa.errors import UsageError
from moa.training.data import Batch, Document, PackedRows, pack
from tests.training.conftest import random_documents


def _documents(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    found = []
    rows = batch.ids, batch.segments, batch.positions, batch.wanted
    for ids, segments, positions, wanted in zip(*rows, strict=True):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            assert positions[inside].tolist() == list(range(inside.sum()))
            found.append((ids[inside].tolist(), wanted[inside].tolist()))
    return found


def test_every_token_and_its_mark_is_in_the_rows_once(tmp_path: Path) -> None:
    documents = random_documents(200, 32)
    rows = pack(documents, 32, tmp_path)
    packed = _documents(rows.rows(np.arange(len(rows))))
    assert sorted(packed) == sorted((d.ids, d.wanted) for d in documents if any(d.wanted[1:]))
    assert rows.tokens == sum(len(ids) for ids, _ in packed)
    assert rows.wanted_tokens == sum(sum(wanted) for _, wanted in packed)
    assert rows.tokens / (len(rows) * 32) > 0.9


def test_a_long_document_goes_on_in_the_next_row(tmp_path: Path) -> None:
    ids = list(range(1, 81))
    rows = pack([Document.text(ids)], 32, tmp_path)
    packed = [piece for piece, _ in _documents(rows.rows(np.arange(len(rows))))]
    assert [i for piece in sorted(packed) for i in piece] == ids


def test_nothing_to_learn_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to learn"):
        pack([Document.answer([5, 6, 7], [])], 32, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_a_function_of_seed_and_step_that_processes_and_micro_steps_share_out(
    rows: PackedRows,
) -> None:
    batches = [rows.batch(*at).rows.tolist() for at in ((3, 5, 4), (3, 5, 4), (4, 5, 4), (3, 6, 4))]
    assert batches[0] == batches[1]
    assert batches[0] not in batches[2:]
    alone = {int(row) for row in rows.batch(0, 1, 8).rows}
    ranks = [rows.batch(0, 1, 4, rank=rank, world=2).rows for rank in range(2)]
    micro = [rows.batch(0, step, 4).rows for step in (2, 3)]
    assert (
        {int(r) for part in ranks for r in part}
        == alone
        == {int(r) for part in micro for r in part}
    )


def test_an_epoch_shows_every_row_once(rows: PackedRows) -> None:
    size = 3
    seen = np.concatenate([rows.batch(0, step, size).rows for step in range(len(rows))])
    for epoch in range(size):
        assert sorted(seen[epoch * len(rows) : (epoch + 1) * len(rows)].tolist()) == list(
            range(len(rows))
        )


@pytest.mark.parametrize("damage", [b"", b"not numpy"])
def test_damaged_rows_are_a_clear_error(rows: PackedRows, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "rows" / "marks.npy").write_bytes(damage)
    with pytest.raises(UsageError, match="no packed training data"):
        PackedRows(tmp_path / "rows")
