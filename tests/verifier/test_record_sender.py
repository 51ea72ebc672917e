from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cloud_verifier.engine.job import RecordRows, finite
from cloud_verifier.sessions.record_sender import OutgoingRecords, RecordSender, RecordWindow
from moa import records
from moa.wire import Ranges
from moa.wire.messages import RecordContract
from tests.verifier.virtual import Clock

HEADS = 2
DIM = 16
CONTRACT = RecordContract(HEADS, DIM, ["int8"])
ROW = records.row_bytes("int8", HEADS, DIM)


def session(count: int = 500, name: int = 0, **settings: Any) -> OutgoingRecords:
    made = RecordRows(HEADS, DIM)
    made.write(0, *np.random.default_rng(name).normal(size=(2, count, HEADS, DIM)))
    usual: dict[str, Any] = {"dtype": "int8", "ready": Ranges([(0, count)]), "rows": made}
    return OutgoingRecords(bytes([name] * 16), [1] * count, **(usual | settings))


def record_sender(clock: Clock | None = None) -> RecordSender:
    return RecordSender(CONTRACT, 1 << 20, clock or Clock())


def ask(sender: RecordSender, *sessions: OutgoingRecords) -> tuple[Any, float | None]:
    """What is sent when these sessions may have something."""
    for session in sessions:
        sender.offer(session)
    return sender.next()


def drain(sender: RecordSender, *sessions: OutgoingRecords) -> list[Any]:
    """Everything that is sent when each frame is acknowledged at once."""
    frames = []
    while (found := ask(sender, *sessions))[0] is not None:
        frames.append(found[0])
        sender.window.ack(sender.window.sent)
    return frames


def test_prompt_rows_arrive_newest_first_each_once_and_right_but_those_that_are_held() -> None:
    one = session(500)
    frames = drain(record_sender(), one)
    assert len(frames) > 2
    spans = [(f.start, f.start + f.rows) for f in frames]
    assert spans[0][1] == 500
    assert all(spans[i + 1][1] == spans[i][0] for i in range(len(spans) - 1))
    assert spans[-1][0] == 0
    assert one.rows is not None
    for frame in frames:
        keys, values = records.decode(frame.payload, "int8", frame.rows, HEADS, DIM)
        sent_keys, sent_values = one.rows.read(frame.start, frame.start + frame.rows)
        np.testing.assert_allclose(keys, sent_keys, atol=0.03)
        np.testing.assert_allclose(values, sent_values, atol=0.03)
    held = session(100, held=Ranges([(10, 90)]))
    assert [(f.start, f.rows) for f in drain(record_sender(), held)] == [(90, 10), (0, 10)]


def test_rows_that_are_new_overtake_those_that_wait() -> None:
    one = session(500, ready=Ranges([(0, 400)]))
    sender = record_sender()
    first, _ = ask(sender, one)
    one.ready.add(400, 500)
    second, _ = ask(sender, one)
    assert first is not None
    assert second is not None
    assert first.start + first.rows == 400
    assert second.start + second.rows == 500


def test_the_session_that_is_most_up_to_date_goes_first() -> None:
    behind = session(100, 1, ready=Ranges([(0, 50)]))
    fresh = session(100, 2)
    frames = drain(record_sender(), behind, fresh)
    assert [f.session[0] for f in frames] == [2, 1]


@pytest.mark.parametrize("settings", [{"dtype": "off"}, {"rows": None}, {"ready": Ranges()}])
def test_nothing_is_sent_where_there_is_nothing_to_send(settings: dict[str, Any]) -> None:
    assert ask(record_sender(), session(10, **settings)) == (None, None)


def test_the_window_bounds_what_is_under_way() -> None:
    one = session(5000)
    sender = record_sender()
    sent = 0
    while (found := ask(sender, one)[0]) is not None:
        sent += len(found.payload)
    assert 0 < sent <= 16 * 1024
    sender.window.ack(sent)
    assert ask(sender, one)[0] is not None


def test_the_window_shrinks_when_acknowledgements_come_late_and_grows_when_they_do_not() -> None:
    clock = Clock()
    window = RecordWindow(1 << 20, clock)
    window.send(1000)
    for senseless in (-1, 0, 10**12):
        assert not window.ack(senseless)
    window.ack(1000)

    def trip(delay: float) -> None:
        window.send(4096)
        clock.now += delay
        window.ack(window.sent)

    for _ in range(20):
        trip(0.010)
    assert window.size > 16 * 1024
    for _ in range(400):
        trip(1.0)
    assert window.size == window.floor


def test_a_byte_rate_is_kept() -> None:
    clock = Clock()
    one = session(500)
    sender = record_sender(clock)
    one.limit(4000)
    sent = 0
    clock.now = 0.0
    while clock.now < 3.0:
        frame, pause = ask(sender, one)
        if frame is not None:
            sent += len(frame.payload)
            sender.window.ack(sender.window.sent)
        else:
            assert pause is not None
            clock.now += pause
    assert 0.5 * 12_000 < sent <= 12_000 + 8192


def test_numbers_that_are_none_do_not_reach_the_edge() -> None:
    rows = RecordRows(1, 2)
    rows.write(0, finite(np.array([[[np.nan, np.inf]]])), finite(np.array([[[-np.inf, 1e9]]])))
    keys, values = rows.read(0, 1)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()
