"""Records find their rows, are acknowledged, and become coarser where the link cannot carry them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edge_client.turn.records import Records
from moa import records
from moa.errors import ProtocolError
from moa.graph.cache import RecordBuffer
from moa.graph.step import Heads
from moa.wire import ClientSession
from moa.wire.messages import Ack, Activations, Sync

HEADS = Heads(2, 32)


def message(
    start: int, rows: int, dtype: records.RecordDtype = "int8", heads: int = 2
) -> Activations:
    values = np.random.default_rng(start).normal(size=(rows, heads, 32)).astype(np.float32)
    payload = records.encode(values, values, dtype)
    return Activations(b"s" * 16, 0, start, rows, dtype, heads, 32, payload)


def of(session: ClientSession, start: int, rows: int) -> Activations:
    return msgspec.structs.replace(message(0, rows), session=session.id, start=start)


def made(**how: Any) -> tuple[Records, RecordBuffer]:
    buffer = RecordBuffer(HEADS)
    return Records(buffer, **how), buffer


def take(sync: Records, message: Activations, now: float = 0.0) -> None:
    sync.flow.arrived(len(message.payload), now)
    sync.flow.taken(len(message.payload))
    sync.keep(message, 100)


def test_rows_arrive_out_of_order_with_holes() -> None:
    sync, buffer = made()
    for start in (20, 0, 10):
        take(sync, message(start, 5), now=float(start))
    assert list(buffer.held) == [(0, 5), (10, 15), (20, 25)]
    expected = np.random.default_rng(10).normal(size=(5, 2, 32))
    found = buffer.feeds()["record_k"][0, :, 10:15].transpose(1, 0, 2)
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_records_of_a_verdict_that_was_lost_wait_until_it_is_told_again() -> None:
    session, (sync, buffer) = ClientSession([3, 1, 4]), made()
    early = of(session, 1, 5)
    usual = of(session, 0, 1)
    sync.arrived += [early, usual]
    sync.store(session, 10)
    assert list(buffer.held) == [(0, 1)]
    assert sync.flow.acknowledge() == Ack(len(early.payload) + len(usual.payload)), (
        "all that came, stored or not"
    )
    session.log += [1, 5, 9]
    sync.store(session, 10)
    assert list(buffer.held) == [(0, 6)]


@pytest.mark.parametrize(("start", "times"), [(6, 1), (2**31 - 1, 1), (4, 65)])
def test_records_of_tokens_that_cannot_be_and_too_many_early_ones_break_the_protocol(
    start: int, times: int
) -> None:
    session, (sync, _) = ClientSession([3, 1, 4]), made()
    sync.arrived += [of(session, start, 5)] * times
    with pytest.raises(ProtocolError, match="records of tokens"):
        sync.store(session, 10)
    assert not sync.held()


def test_acknowledgements_count_by_connection() -> None:
    sync, _ = made()
    assert sync.flow.acknowledge() is None
    size = len(message(0, 5).payload)
    take(sync, message(0, 5), 0.0)
    take(sync, message(5, 5), 0.0)
    assert sync.flow.acknowledge() == Ack(2 * size)
    assert sync.flow.acknowledge() is None
    sync.flow.connected()
    take(sync, message(10, 5), 0.0)
    assert sync.flow.acknowledge() == Ack(size)


def test_a_link_that_cannot_carry_them_gets_smaller_ones_until_it_can() -> None:
    (fast, _), (slow, _), (metered, _) = made(), made(), made()
    session = ClientSession([1, 2])
    limited = ClientSession([1], record_rate=1400)
    for i in range(12):
        take(fast, message(i, 1), now=1 + i * 0.0001)
        take(metered, message(i, 1), now=1 + i * 0.0001)
        take(slow, message(i, 1), now=1 + i * 0.1)
    assert fast.adjust(session, tokens_per_second=20) is None
    assert metered.adjust(limited, tokens_per_second=50) is not None, (
        "a budget counts as a slow link"
    )
    assert slow.adjust(session, tokens_per_second=20) == Sync(session.id, "int4", 0)
    assert slow.dtype == "int4"
    assert slow.adjust(session, tokens_per_second=20) is None
    for i in range(40):
        take(slow, message(i, 1, "int4"), now=10 + i * 0.0001)
    assert slow.adjust(session, tokens_per_second=20) == Sync(session.id, "int8", 0)
    assert session.records == slow.dtype == "int8"


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "off"])
def test_what_the_user_says_is_asked_for(precision: records.RecordDtype) -> None:
    assert made(precision=precision)[0].dtype == precision
    assert Records(None, precision=precision).dtype == "off"


def test_records_of_another_drafter_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 x 32"):
        take(made()[0], message(0, 1, heads=3))
