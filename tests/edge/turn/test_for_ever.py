"""Errors that repeat for ever: a first token within 3 s, and an end within `settle` after the text
is complete."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from edge_client.turn.controller import WhoDrafts
from edge_client.turn.deadlines import Patience
from moa.wire import Code
from moa.wire.messages import (
    Append,
    Foresee,
    Open,
    Opened,
    Resume,
    Resumed,
    Stream,
    StreamTokens,
)
from tests.edge.turn.world import World

WAYS: dict[str, dict[str, Any]] = {
    "device, a draft a round": {"draft": "device"},
    "device, ahead": {"draft": "device", "guess_ahead": True},
    "server": {"draft": "server"},
    "auto": {"draft": "auto", "guess_ahead": True},
}
REFUSED: dict[str, tuple[type, ...]] = {
    "every round": (Stream, Foresee),
    "every open": (Open, Append, Resume),
    "everything": (Open, Append, Resume, Stream, Foresee),
}
CASES = [
    (way, refused)
    for way in WAYS
    for refused in REFUSED
    if refused == "every round" or way in ("auto", "server")
]
"""Until its session is open a turn goes on alike in all ways: two stand for all."""
FAULTS = [*(code.value for code in Code), "from_the_future", "mute"]
FIRST_TOKEN = 3.0
SETTLE = Patience().settle


def bounded(world: World) -> list[float]:
    """When each token came; the first one and the end came soon enough."""
    assert world.run(seconds=60), "no end"
    assert len(world.answer) == world.count
    assert world.reader.told_at[0] <= FIRST_TOKEN
    assert world.now - world.reader.changed_at <= SETTLE + 0.1
    return world.reader.told_at


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("way", "refused"), CASES)
def test_one_error_for_ever(fault: str, way: str, refused: str) -> None:
    world = World(**WAYS[way])
    world.verifier.fault = fault
    world.verifier.refuses = REFUSED[refused]
    bounded(world)
    assert world.most_requests_per_second() <= 8


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_one_error_from_the_middle_on(fault: str, way: str) -> None:
    world = World(**WAYS[way], forward=0.05)
    world.trouble(fault, 0.4)
    assert (
        max(later - sooner for sooner, later in itertools.pairwise(bounded(world))) <= FIRST_TOKEN
    )


def ends_after_each_opening(world: World) -> None:
    deliver = world._deliver

    def cut(connection: int, answer: object) -> None:
        deliver(connection, answer)
        if isinstance(answer, Opened | Resumed) and connection == world.connection:
            world.cut()

    world._deliver = cut  # type: ignore[method-assign]


def answers_another_round(world: World) -> None:
    world.change = lambda m: replace(m, round=m.round + 1) if isinstance(m, StreamTokens) else m


def comes_and_goes(world: World) -> None:
    """No connection lives long enough for a round."""
    world.trouble("mute")

    def cut() -> None:
        world.cut()
        world.at(0.7, cut)

    world.at(0.2, cut)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("link", "redial"),
    [
        *((ends_after_each_opening, redial) for redial in (0.0, 0.1, 2.0)),
        (answers_another_round, 0.1),
        (comes_and_goes, 0.3),
    ],
)
def test_a_link_that_never_lets_a_round_end(
    way: str, link: Callable[[World], None], redial: float
) -> None:
    world = World(**WAYS[way], redial=redial)
    link(world)
    bounded(world)


@pytest.mark.parametrize("right", [0.0, 1e-4, 0.004, math.nan])
@pytest.mark.parametrize("draft", ["device", "auto"])
def test_a_drafter_that_knows_nothing(draft: WhoDrafts, right: float) -> None:
    """The verifier that waits for guesses is sent one, however unlikely; no token is written
    offline for it."""
    world = World(draft=draft, guess_ahead=True, count=12, chances=lambda _: right)
    assert world.run(seconds=30) == "length"
    assert world.answer == world.expected
    assert world.machine.stats.offline_tokens == 0
    assert world.now < 1.5
