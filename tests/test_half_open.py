from __future__ import annotations

from unittest.mock import Mock

import pytest

from moa.process import half_open
from moa.process.half_open import HalfOpen, room_for_connections


def half(host: str, port: int = 1) -> Mock:
    """A half-open connection."""
    return Mock(peer=f"{host}:{port}")


def test_the_oldest_of_the_most_crowded_address_makes_room_and_is_reported() -> None:
    told: list[tuple[str, int]] = []
    waiting = HalfOpen(4, lambda peer, count: told.append((peer, count)))
    good = half("good")
    crowd = [half("crowd", port) for port in range(6)]
    waiting.enter(good)
    for one in crowd:
        waiting.enter(one)
    assert not good.abort.called
    assert [one.abort.called for one in crowd] == [True, True, True, False, False, False]
    assert len(waiting) == 4
    assert told == [("crowd:0", 4), ("crowd:1", 4), ("crowd:2", 4)]
    for one in (good, *crowd):
        waiting.leave(one)
    waiting.make_room()
    assert len(told) == 3, "of nobody there is nobody to drop"
    late = half("crowd")
    for _ in range(5):  # who has finished its handshake does not count
        waiting.enter(late)
        waiting.leave(late)
        waiting.leave(late)
    assert not late.abort.called


@pytest.mark.parametrize(
    ("free", "ports", "expected"),
    [
        (None, 1, (4096, 128)),
        (10_000, 1, (4096, 128)),
        (100, 1, (75, 25)),
        (200, 2, (75, 25)),
        (2, 1, (1, 1)),
    ],
)
def test_no_more_connections_than_files_may_be_open(
    free: int | None, ports: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_open, "_free_descriptors", lambda: free)
    assert room_for_connections(4096, 128, ports=ports) == expected
