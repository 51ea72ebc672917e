"""Records find their rows, are acknowledged, and become coarser where the link cannot carry them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.drafter.cache import RecordBuffer
from edge_client.drafter.graph import Heads
from edge_client.turn.budget import Budget
from edge_client.turn.sync import RecordSync
from moa import records
from moa.errors import ProtocolError
from moa.wire import ClientSession
from moa.wire.messages import Ack, Activations, Sync

HEADS = Heads(2, 32)


def take(sync: RecordSync, message: Activations, now: float = 0.0) -> None:
    sync.arrived(message, now)
    sync.keep(message)


def message(start: int, rows: int, dtype: records.RecordDtype = "int8", heads: int = 2) -> Activations:
    values = np.random.default_rng(start).normal(size=(rows, heads, 32)).astype(np.float32)
    payload = records.encode(values, values, dtype)
    return Activations(b"s" * 16, 0, start, rows, dtype, heads, 32, payload)


def test_rows_arrive_out_of_order_with_holes() -> None:
    sync = RecordSync(RecordBuffer(HEADS))
    assert sync.buffer is not None
    for start in (20, 0, 10):
        take(sync, message(start, 5), now=float(start))
    assert list(sync.buffer.held) == [(0, 5), (10, 15), (20, 25)]
    expected = np.random.default_rng(10).normal(size=(5, 2, 32))
    found = sync.buffer.feeds()["record_k"][0, :, 10:15].transpose(1, 0, 2)
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_acknowledgements_count_by_connection() -> None:
    sync = RecordSync(RecordBuffer(HEADS))
    assert sync.acknowledge() is None
    size = len(message(0, 5).payload)
    take(sync, message(0, 5), 0.0)
    take(sync, message(5, 5), 0.0)
    assert sync.acknowledge() == Ack(2 * size)
    assert sync.acknowledge() is None
    sync.connected()
    take(sync, message(10, 5), 0.0)
    assert sync.acknowledge() == Ack(size)


def test_a_link_that_cannot_carry_them_gets_smaller_ones() -> None:
    session = ClientSession([1, 2])
    fast, slow = RecordSync(RecordBuffer(HEADS)), RecordSync(RecordBuffer(HEADS))
    for i in range(12):
        take(fast, message(i, 1), now=1 + i * 0.0001)
        take(slow, message(i, 1), now=1 + i * 0.1)
    assert fast.adjust(session, tokens_per_second=20) is None
    assert slow.adjust(session, tokens_per_second=20) == Sync(session.id, "int4", 0)
    assert slow.dtype == "int4"
    assert slow.adjust(session, tokens_per_second=20) is None


def test_a_budget_counts_as_a_slow_link() -> None:
    sync = RecordSync(RecordBuffer(HEADS), budget=Budget(max_kbps=16))
    for i in range(12):
        take(sync, message(i, 1), now=1 + i * 0.0001)
    assert sync.adjust(ClientSession([1]), tokens_per_second=50) is not None


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "off"])
def test_what_the_user_says_is_asked_for(precision: records.RecordDtype) -> None:
    assert RecordSync(RecordBuffer(HEADS), precision).dtype == precision
    assert RecordSync(None, precision).dtype == "off"


def test_records_of_another_drafter_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 x 32"):
        take(RecordSync(RecordBuffer(HEADS)), message(0, 1, heads=3))
