from __future__ import annotations

import asyncio
import functools

import pytest

from edge_client.device import Device
from edge_client.events import Confirm, Done, Prompt, Retract, Token
from edge_client.turn.controller import WhoDrafts
from tests.torture.codes import table
from tests.torture.device import beside, demo_device, story
from tests.torture.history import violations

device = functools.cache(demo_device)

_WORST = (
    "forward of infinite ms",
    "quarantined",
    "cancelled",
    "tokens without end",
    "activations at 2^31",
    "goaway at once",
    "cut",
)
"""What looped, crashed or asked for a terabyte before; `make torture` goes through all of them."""
_FOR_EVER = ("busy to every round", "quarantined to every open", "cut after each opening", "silence", "another round")


@pytest.mark.timeout(600)
async def test_a_device_goes_on_whatever_a_verifier_says() -> None:
    loaded: Device = device()
    for outcome in await asyncio.gather(*(beside(behaviour, loaded, patience=300.0) for behaviour in _WORST)):
        assert outcome.problems == (), outcome.behaviour
        assert outcome.tokens > 0, outcome.behaviour
        assert outcome.megabytes < 500


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_an_error_for_ever_ends(draft: WhoDrafts) -> None:
    """Over sockets; `tests/edge/turn/test_for_ever.py` has every error in virtual time, with bounds of time."""
    for outcome in await asyncio.gather(*(beside(behaviour, device(), draft=draft) for behaviour in _FOR_EVER)):
        assert outcome.problems == (), outcome.behaviour
        assert outcome.tokens > 0, outcome.behaviour


def test_events_are_a_story_that_can_be_checked() -> None:
    def token(position: int, id: int, status: str) -> Token:
        return Token(position=position, id=id, text="", status=status)  # type: ignore[arg-type]

    events = [
        Prompt(ids=[1, 2]),
        token(2, 3, "verified"),
        token(3, 9, "provisional"),
        token(4, 9, "provisional"),
        Confirm(start=3, stop=4),
        Retract(start=4, stop=5, characters=0),
        token(4, 5, "verified"),
        Done(reason="length", verified=True, text="", stats={}),
    ]
    assert violations(story(events)) == []
    assert violations(story([*events[:3], *events[4:]])) != []


async def test_an_error_for_ever_ends_in_each_mode_of_the_endpoint() -> None:
    """With little patience; `make torture` waits as long as the modes do."""
    cells = await table(demo_device(), ["busy to every round", "cancelled to every open"], patience=1.0)
    assert len(cells) == 6
    assert {(one.mode, one.finish) for one in cells} == {
        ("keep", "length"),
        ("provisional", "length"),
        ("hold", "not_verified"),
    }
    assert not [problem for one in cells for problem in one.problems]
