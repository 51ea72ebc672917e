"""Resumable streams: same key only, within limits of time and memory."""

from __future__ import annotations

import pytest

from moa.api.errors import ApiError
from moa.api.http import DONE
from moa.api.replay import Recording, Recordings, position


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recordings() -> tuple[Recordings, Clock]:
    clock = Clock()
    return Recordings(clock, keep_seconds=10, alone_seconds=5, most_bytes=50_000), clock


def test_a_stranger_learns_nothing() -> None:
    kept, _ = recordings()
    kept.open("a", "me")
    with pytest.raises(ApiError) as one:
        kept.get("a", "other")
    with pytest.raises(ApiError) as none:
        kept.get("b", "me")
    assert one.value.status == none.value.status == 404
    assert str(one.value).replace("'a'", "") == str(none.value).replace("'b'", "")


def test_what_is_complete_is_kept_for_a_while_and_then_forgotten() -> None:
    kept, clock = recordings()
    kept.open("a", "me").close()
    clock.now += 10
    assert kept.get("a", "me").closed
    clock.now += 0.1
    with pytest.raises(ApiError):
        kept.get("a", "me")


def test_work_that_nobody_listens_to_is_stopped() -> None:
    kept, clock = recordings()
    stopped = []
    stream = kept.open("a", "me")
    stream.cancel = lambda: stopped.append(1)
    stream.listeners = 1
    clock.now += 100
    kept.sweep()
    assert not stopped
    stream.listeners = 0
    stream.touched = clock()
    clock.now += 5.1
    kept.sweep()
    assert stopped == [1]
    assert stream.closed


def kept_stream(
    kept: Recordings, clock: Clock, name: str, principal: str = "me", size: int = 0
) -> None:
    """A complete stream, a moment after the one before."""
    stream = kept.open(name, principal)
    stream.add("x" * size)
    stream.close()
    clock.now += 0.001


def test_memory_is_bounded_and_complete_streams_go_first() -> None:
    kept, clock = recordings()
    running = kept.open("running", "me")
    for name in ("old", "new"):
        kept_stream(kept, clock, name, size=15_000)
    running.add("x" * 15_000)
    kept.sweep()
    assert {stream.id for stream in kept} == {"running", "new"}
    assert kept.size <= 50_000


def test_one_key_cannot_push_out_anothers_streams_not_even_by_their_number() -> None:
    kept, clock = recordings()
    done = kept.open("done", "a")
    running = kept.open("running", "a")
    done.close()
    for number in range(1000):
        kept_stream(kept, clock, f"b{number}", "b", number % 7)
    assert kept.size <= 50_000
    assert [stream for stream in kept if stream.principal == "a"] == [done, running]
    assert not running.closed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a/3", 3),
        ("7", 7),
        *((text, None) for text in ("x", "b/3", "a/-1", "a/", "", "a/٣", "a/9999999999")),
    ],
)
def test_a_position_is_read_with_or_without_the_stream(text: str, number: int | None) -> None:
    if number is not None:
        assert position(text, "a") == number
        return
    with pytest.raises(ApiError):
        position(text, "a")


async def rest_of(stream: Recording, after: int) -> list[bytes]:
    """What a client is sent that has so many frames."""
    return [frame async for frame in stream.listen(after)]


async def test_who_comes_back_right_after_the_end_gets_the_rest_and_the_end() -> None:
    """Also who has all of it: a stream without its end counts as broken off, and would be asked for
    again and again."""
    kept, _ = recordings()
    stream = kept.open("a", "me")
    for event in ({"text": "b"}, {"text": "c"}, DONE):
        stream.add(event)
    stream.close()
    frames = stream.frames
    for after in range(3):
        assert await rest_of(stream, after) == frames[after:]
    for after in (3, 4, 1000):
        assert await rest_of(stream, after) == frames[2:]


async def test_a_stream_that_was_stopped_has_no_end() -> None:
    kept, _ = recordings()
    stream = kept.open("a", "me")
    stream.add({"text": "b"})
    kept.drop(stream)
    assert await rest_of(stream, 1) == []
