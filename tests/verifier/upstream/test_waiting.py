"""How long a device waits for an engine that is silent and tells its models: as long as the reading
of its prompt can explain. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from cloud_verifier.upstream.contract import Continuation, Piece
from edge_client.turn.deadlines import Patience
from moa.sampling import SamplingSettings
from tests.edge.turn.world import World
from tests.verifier.upstream.scripted import Job, engine_and_turn
from tests.verifier.upstream.test_spending import Clock


class Hanging:
    """Upstreams that never answer."""

    async def go_on(self, asked: Continuation) -> AsyncGenerator[Piece, None]:
        await asyncio.Event().wait()
        yield Piece()


async def reading_seconds(prompt: int, draft: int = 0) -> float:
    """For how long the verifier says that a hanging engine may be reading so many tokens."""
    clock = Clock()
    job: Any = Job()
    engine, turn = engine_and_turn(Hanging(), job, clock)
    asked = Continuation(
        ids=[1] * prompt, text="", sampling=SamplingSettings(), most=1, draft=[1] * draft
    )
    began = clock.now
    async with contextlib.aclosing(engine._pieces(turn, asked)) as pieces:
        asking = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        assert engine.queued == 1
        while engine.may_be_reading(job):
            clock.now += 0.125
            assert clock.now < began + 3600
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert engine.queued == 0
    return clock.now - began


@pytest.mark.parametrize(
    ("prompt", "least", "most"),
    [(1, 1.0, 2.0), (30, 2.0, 3.0), (100, 5.0, 7.0), (4000, 10.5, 13.0)],
)
async def test_a_device_waits_for_a_hanging_engine_as_long_as_its_prompt_explains(
    prompt: int, least: float, most: float
) -> None:
    seconds = await reading_seconds(prompt)
    patience = Patience(settle=99.0)
    world = World(
        count=4, draft="device", tells=True, tells_for=seconds, forward=300.0, patience=patience
    )
    world.run()
    assert least < world.reader.late_at < most


async def test_a_draft_that_is_checked_is_read_too() -> None:
    assert await reading_seconds(30, draft=170) == await reading_seconds(200)
