"""Errors that repeat for ever: a first token within 3 s, and an end within `settle` after the text is complete."""

from __future__ import annotations

import itertools
import math

import pytest
from msgspec.structs import replace

from edge_client.turn.controller import WhoDrafts
from edge_client.turn.deadlines import Patience
from moa.wire import Code
from moa.wire.messages import Append, Foresee, Open, Opened, Resume, Resumed, Stream, StreamTokens, Verdict, Verify
from tests.edge.turn.world import World

WAYS: dict[str, tuple[WhoDrafts, bool]] = {
    "device, a draft a round": ("device", False),
    "device, ahead": ("device", True),
    "server": ("server", False),
    "auto": ("auto", True),
    "single": ("single", False),
}
REFUSED: dict[str, tuple[type, ...]] = {
    "every round": (Verify, Stream, Foresee),
    "every open": (Open, Append, Resume),
    "everything": (Open, Append, Resume, Verify, Stream, Foresee),
}
CASES = [(way, refused) for way in WAYS for refused in REFUSED if refused == "every round" or way in ("auto", "single")]
"""Until its session is open a turn goes on alike in all ways: two stand for all."""
FAULTS = [*(code.value for code in Code), "from_the_future", "mute"]
FIRST_TOKEN, SETTLE = 3.0, Patience().settle


def ended(world: World) -> tuple[float, float]:
    """Seconds until the first token, and from the last one, or its verification, until the end."""
    assert world.run(seconds=60), "no end"
    assert len(world.answer) == world.count
    return world.reader.told_at[0], world.now - world.reader.changed_at


def bounded(world: World) -> None:
    first, waited = ended(world)
    assert first <= FIRST_TOKEN
    assert waited <= SETTLE + 0.1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("way", "refused"), CASES)
def test_one_error_for_ever(fault: str, way: str, refused: str) -> None:
    draft, guess_ahead = WAYS[way]
    world = World(draft=draft, guess_ahead=guess_ahead)
    world.verifier.fault, world.verifier.refuses = fault, REFUSED[refused]
    bounded(world)
    assert world.most_requests_per_second() <= 8


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_one_error_from_the_middle_on(fault: str, way: str) -> None:
    draft, guess_ahead = WAYS[way]
    world = World(draft=draft, guess_ahead=guess_ahead, forward=0.05)
    world.at(0.4, lambda: setattr(world.verifier, "fault", fault))
    _, waited = ended(world)
    assert waited <= SETTLE + 0.1
    told = world.reader.told_at
    assert max(later - sooner for sooner, later in itertools.pairwise(told)) <= FIRST_TOKEN


@pytest.mark.parametrize("redial", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_ends_after_each_opening(way: str, redial: float) -> None:
    draft, guess_ahead = WAYS[way]
    world = World(draft=draft, guess_ahead=guess_ahead, redial=redial)
    deliver = world._deliver

    def cut(connection: int, answer: object) -> None:
        deliver(connection, answer)
        if isinstance(answer, Opened | Resumed) and connection == world.connection:
            world.cut()

    world._deliver = cut  # type: ignore[method-assign]
    bounded(world)


@pytest.mark.parametrize("way", WAYS)
def test_answers_to_another_round(way: str) -> None:
    draft, guess_ahead = WAYS[way]
    world = World(draft=draft, guess_ahead=guess_ahead)
    world.change = lambda m: replace(m, round=m.round + 1) if isinstance(m, Verdict | StreamTokens) else m
    bounded(world)


@pytest.mark.parametrize("way", WAYS)
def test_a_link_that_comes_and_goes_for_ever(way: str) -> None:
    """No connection lives long enough for a round."""
    draft, guess_ahead = WAYS[way]
    world = World(draft=draft, guess_ahead=guess_ahead, redial=0.3)
    world.verifier.fault = "mute"

    def cut() -> None:
        world.cut()
        world.at(0.7, cut)

    world.at(0.2, cut)
    bounded(world)


@pytest.mark.parametrize("right", [0.0, 1e-4, 0.004, math.nan])
@pytest.mark.parametrize("draft", ["device", "auto"])
def test_a_drafter_that_knows_nothing(draft: WhoDrafts, right: float) -> None:
    """The verifier that waits for guesses is sent one, however unlikely; no token is written offline for it."""
    world = World(draft=draft, guess_ahead=True, count=12, chances=lambda _: right)
    assert world.run(seconds=30) == "length"
    assert world.answer == world.expected
    assert world.machine.stats.offline_tokens == 0
    assert world.now < 1.5
