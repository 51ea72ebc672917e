"""How long a device waits for an engine that is silent, and tells its models all the time: it may be
reading a prompt. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from cloud_verifier.upstream.contract import Continuation, Piece, Reading
from edge_client.turn.controller import Controller
from edge_client.turn.deadlines import Deadlines, Patience
from moa.sampling import SamplingSettings
from moa.wire.messages import Progress
from tests.edge.turn.world import World
from tests.verifier.upstream.scripted import Job, engine_and_turn

NEVER = 10_000.0
"""Seconds of a forward of an engine that hangs."""
PATIENT = Patience(settle=99.0)
AWAY = "the upstream is not reached"


class Saying:
    """Upstreams that answer with what a test gives them."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[Piece] = asyncio.Queue()

    async def go_on(self, asked: Continuation) -> AsyncGenerator[Piece, None]:
        while True:
            yield await self.pieces.get()


async def test_what_an_engine_has_read_is_told_until_it_begins_to_answer() -> None:
    saying = Saying()
    job: Any = Job()
    engine, turn = engine_and_turn(saying, job)
    asked = Continuation(ids=[1] * 9, text="", sampling=SamplingSettings(), most=1)
    assert engine.read_for(job) is None
    told: list[int | None] = []
    async with contextlib.aclosing(engine._pieces(turn, asked)) as pieces:
        for piece in (Piece(), Piece(reading=Reading(4, 9)), Piece(), Piece(text="a"), Piece()):
            asking = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)
            told.append(engine.read_for(job))
            saying.pieces.put_nowait(piece)
            await asking
    assert told == [0, 0, 4, 4, None]
    assert engine.queued == 0


async def told_while(asked: list[int], saying: Saying) -> list[int | None]:
    """What is told of an answer that has begun, while another one is asked for, and behind that."""
    jobs: list[Any] = [Job(), Job()]
    engine, first = engine_and_turn(saying, jobs[0])
    _, second = engine_and_turn(saying, jobs[1])
    jobs[0].ids = asked
    text = Continuation(ids=asked, text="", sampling=SamplingSettings(), most=9)
    async with (
        contextlib.aclosing(engine._pieces(first, text)) as answer,
        contextlib.aclosing(engine._pieces(second, text)) as other,
    ):
        saying.pieces.put_nowait(Piece(text="a"))
        await anext(answer)
        told = [engine.read_for(jobs[0])]
        beginning = asyncio.ensure_future(anext(other))
        await asyncio.sleep(0)
        told.append(engine.read_for(jobs[0]))
        saying.pieces.put_nowait(Piece(text="b"))
        await beginning
        told.append(engine.read_for(jobs[0]))
        saying.pieces.put_nowait(Piece(is_complete=True))
        await anext(answer)
        told.append(engine.read_for(jobs[0]))
    return [*told, engine.read_for(jobs[0])]


async def test_an_answer_that_has_begun_is_waited_for_while_the_engine_reads_or_counts() -> None:
    """A second choice is asked for beside the first, whose next word may be its end; and an end that
    has come is told with its count."""
    assert await told_while([1] * 9, Saying()) == [None, 9, None, 9, None]


@pytest.mark.parametrize("keep", ["keep", "rewind"])
def test_nothing_stays_behind_an_answer_that_stands_still_while_the_engine_reads(keep: Any) -> None:
    """For four seconds, in the middle of a long answer: what it waits for may be its end. A device
    that corrects its text goes on meanwhile."""
    world = waiting(30, on_reconnect=keep, forward=0.25, count=100, right=0.0)
    world.change = lambda m: replace(m, done=m.total) if isinstance(m, Progress) else m
    for at, forward in ((20.0, 4.0), (21.0, 0.25)):
        world.at(at, partial(setattr, world.verifier, "forward", forward))
    assert world.run() == "length"
    assert world.answer == world.expected
    assert all(world.reader.verified)
    assert ("late" in world.reader.states) == (keep == "rewind")


def test_the_first_word_in_mid_answer_counts_from_the_latest_token() -> None:
    """The request is a minute old then."""
    for text_stays in (True, False):
        deadlines = Deadlines(
            Patience(),
            Controller(),
            waiting_since=0.0,
            text_stays=text_stays,
            engine_behind=True,
        )
        deadlines.asked(0.0)
        deadlines.progressed(60.0)
        usual = deadlines.write_at()
        deadlines.heard(40, 0, 62.0)
        assert deadlines.write_at() - usual == pytest.approx(2.0 * text_stays, abs=0.1)


def waiting(prompt: int, **how: Any) -> World:
    """A device with a prompt of so many tokens, in front of an engine that hangs and lives."""
    settings: dict[str, Any] = {"forward": NEVER, "patience": PATIENT, "draft": "device"}
    settings |= {"count": 4, "tells": True, "engine_behind": True}
    return World(prompt=[3, 1, 4, 1, 5] * (prompt // 5), **(settings | how))


@pytest.mark.parametrize(
    ("prompt", "least", "most"),
    [(5, 1.0, 2.0), (30, 2.0, 3.0), (100, 5.0, 7.0), (4000, 10.5, 13.0)],
)
def test_a_device_that_corrects_its_text_waits_as_long_as_the_prompt_explains(
    prompt: int, least: float, most: float
) -> None:
    world = waiting(prompt)
    world.run()
    assert least < world.reader.late_at < most


@pytest.mark.parametrize(
    ("prompt", "least", "most"), [(5, 10.5, 13.0), (100, 10.5, 13.0), (4000, 200.0, 203.0)]
)
def test_a_device_whose_text_stays_waits_longer(prompt: int, least: float, most: float) -> None:
    """Its whole answer would stand in the place of the engine's."""
    world = waiting(prompt, on_reconnect="keep")
    world.run()
    assert least < world.reader.late_at < most


def test_a_verifier_that_claims_more_than_there_is_to_read_is_not_believed() -> None:
    world = waiting(30, on_reconnect="keep")
    world.change = lambda m: replace(m, total=2**31 - 1) if isinstance(m, Progress) else m
    world.run()
    assert world.reader.late_at < 13


def test_nobody_waits_for_an_engine_that_is_not_heard_of() -> None:
    for keep in ("keep", "rewind"):
        world = waiting(4000, on_reconnect=keep, tells_for=0.0)
        world.run()
        assert world.reader.late_at < 2.0


def test_an_answer_is_the_engines_where_that_is_slower_than_the_device_would_be() -> None:
    """By its third second the device would have written all of it, and it would stay."""
    for forward in (5.0, 9.0):
        world = waiting(30, on_reconnect="keep", forward=forward, count=3)
        assert world.run() == "length"
        assert world.reader.states == ["online"]
        assert world.answer == world.expected
        assert all(world.reader.verified)


def test_an_engine_that_began_late_is_waited_for_by_that_the_next_time() -> None:
    world = waiting(30, on_reconnect="keep", forward=30.0, right=0.0, count=2)
    world.run()
    assert 10 < world.reader.late_at < 13
    assert world.controller.first_text == pytest.approx(30.0, abs=1.0)
    world.forward = world.verifier.forward = 55.0
    began = world.now
    world.next_turn(5, count=1, anew=True)
    assert world.run() == "length"
    assert world.reader.states == ["online"]
    assert world.now - began < 57


def test_an_engine_that_had_not_begun_is_waited_for_twice_as_long_up_to_a_minute() -> None:
    """Else every answer of a slow one would be the device's."""
    late_after = []
    world = waiting(30, on_reconnect="keep", patience=Patience(settle=1.0))
    for turn in range(5):
        began = world.now
        assert world.run(seconds=NEVER) == "length"
        late_after.append(world.reader.late_at - began)
        world.next_turn(5 + turn, anew=True)
    assert late_after[:4] == sorted(late_after[:4])
    assert late_after[1] > 1.9 * late_after[0]
    assert late_after[3] == pytest.approx(late_after[4], abs=1.0)
    assert 60 < late_after[4] < 63


def test_a_wait_of_long_ago_is_forgotten() -> None:
    controller = Controller()
    controller.began(40.0)
    for _ in range(10):
        controller.began(0.5)
    assert controller.first_text < 1.0


def test_an_engine_that_reads_is_waited_for_where_the_device_cannot_write() -> None:
    """For as long as it lives, and the user hears of it."""
    for keep in ("keep", "rewind"):
        world = waiting(4000, on_reconnect=keep, forward=500.0, count=2)
        world.machine.drafter_failed("it fails")
        assert world.run(seconds=NEVER) == "length"
        assert world.connection == 1, "another connection would have it read anew"
        assert world.answer == world.expected
        heard_at = [*world.reader.heard_at, world.now]
        assert max(later - sooner for sooner, later in itertools.pairwise(heard_at)) < 1.0


def away(**how: Any) -> World:
    """A device in front of a verifier that refuses, because its engine has been away for long."""
    world = World(count=200, draft="server", step=0.001, up_after=0.0, engine_behind=True, **how)
    world.trouble("busy")
    return world


def test_where_the_engine_is_known_to_be_away_the_device_writes_at_once_and_fast() -> None:
    """While an answer is only late most text would be withdrawn, and comes slowly: 20 tokens a
    second."""
    for unheard, settle in ((True, 0.5), (False, 5.0)):
        world = away()
        world.at(
            0.0,
            lambda world=world, how=unheard: world.machine.engine_away(
                AWAY, since=-60.0, unheard=how
            ),
        )
        assert world.run() == "length"
        assert world.reader.told_at[0] < 0.2
        assert world.reader.told_at[-1] < 1.0
        assert world.now - world.reader.told_at[-1] == pytest.approx(settle, abs=0.2)


def test_an_engine_that_has_just_gone_is_waited_for_for_a_second() -> None:
    world = away()
    world.at(0.0, lambda: world.machine.engine_away(AWAY, since=0.0))
    world.run()
    assert 1.0 < world.reader.told_at[0] < 1.3


def test_an_engine_that_takes_the_request_is_no_longer_away() -> None:
    """It is looked at every few seconds only: it may be back before that is known."""
    world = waiting(30, on_reconnect="keep", forward=5.0, count=2, up_after=0.0)
    world.at(0.0, lambda: world.machine.engine_away(AWAY, since=-60.0))
    assert world.run() == "length"
    assert world.reader.states == ["online"]
