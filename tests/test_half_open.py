from __future__ import annotations

import pytest

from moa.process import half_open
from moa.process.half_open import HalfOpen, room_for_connections


class Half:
    """A half-open connection."""

    def __init__(self, host: str, port: int = 1) -> None:
        self.peer, self.dropped = f"{host}:{port}", False

    def abort(self) -> None:
        """End it at once."""
        self.dropped = True


def test_the_oldest_of_the_most_crowded_address_makes_room_and_is_reported() -> None:
    told: list[tuple[str, int]] = []
    waiting = HalfOpen(4, lambda peer, count: told.append((peer, count)))
    good, crowd = Half("good"), [Half("crowd", port) for port in range(6)]
    waiting.enter(good)
    for half in crowd:
        waiting.enter(half)
    assert not good.dropped
    assert [half.dropped for half in crowd] == [True, True, True, False, False, False]
    assert len(waiting) == 4
    assert told == [("crowd:0", 4), ("crowd:1", 4), ("crowd:2", 4)]
    for half in (good, *crowd):
        waiting.leave(half)
    waiting.make_room()
    assert len(told) == 3, "of nobody there is nobody to drop"
    late = Half("crowd")
    for _ in range(5):  # who has finished its handshake does not count
        waiting.enter(late)
        waiting.leave(late)
        waiting.leave(late)
    assert not late.dropped


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
