from __future__ import annotations

import logging

import pytest

from cloud_verifier.serving import half_open
from cloud_verifier.serving.half_open import HalfOpen, room_for_connections


class Half:
    """A half-open connection."""

    def __init__(self, host: str, port: int = 1) -> None:
        self.peer, self.dropped = f"{host}:{port}", False

    def abort(self) -> None:
        """End it at once."""
        self.dropped = True


def test_the_oldest_of_the_most_crowded_address_makes_room_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_open.log, "propagate", True)
    counted: list[int] = []
    waiting = HalfOpen(4, lambda: counted.append(1))
    good, crowd = Half("good"), [Half("crowd", port) for port in range(6)]
    waiting.enter(good)
    with caplog.at_level(logging.WARNING):
        for half in crowd:
            waiting.enter(half)
    assert not good.dropped
    assert [half.dropped for half in crowd] == [True, True, True, False, False, False]
    assert len(waiting) == 4
    assert len(counted) == 3
    assert {record.limit for record in caplog.records} == {"max_half_open"}  # type: ignore[attr-defined]


def test_who_has_finished_its_handshake_does_not_count() -> None:
    waiting = HalfOpen(1)
    first, second = Half("a"), Half("a")
    waiting.enter(first)
    waiting.leave(first)
    waiting.leave(first)
    waiting.enter(second)
    assert not first.dropped
    assert not second.dropped


@pytest.mark.parametrize(
    ("free", "expected"), [(None, (4096, 128)), (10_000, (4096, 128)), (100, (75, 25)), (2, (1, 1))]
)
def test_no_more_connections_than_files_may_be_open(
    free: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_open, "_free_descriptors", lambda: free)
    assert room_for_connections(4096, 128) == expected


def test_a_process_knows_how_many_files_it_may_still_open() -> None:
    free = half_open._free_descriptors()
    assert free is None or free > 2
