from __future__ import annotations

import asyncio
import contextlib

import pytest

from edge_client.events import Adopt, Confirm, Done, Event, Prompt, Retract, Status, Token
from tests.edge.reader import Reader
from tests.torture.codes import table
from tests.torture.device import beside, demo_device

_WORST = (
    "forward of infinite ms",
    "quarantined",
    "empty stream tokens",
    "tokens without end",
    "activations at 2^31",
    "goaway at once",
    "cut",
    "busy to every round",
    "quarantined to every open",
    "cut after each opening",
    "silence",
    "another round",
)
"""What looped, crashed or asked for a terabyte before; `make torture` goes through all of them, and
`tests/edge/turn/test_for_ever.py` through every error for ever in virtual time, with bounds of
time."""


@pytest.mark.timeout(600)
async def test_a_device_goes_on_whatever_a_verifier_says() -> None:
    device = demo_device()
    for outcome in await asyncio.gather(
        *(beside(behaviour, device, patience=300.0) for behaviour in _WORST)
    ):
        assert outcome.problems == [], outcome.behaviour
        assert outcome.tokens > 0, outcome.behaviour
        assert outcome.megabytes < 500


def _token(position: int, status: Status = "verified") -> Token:
    return Token(position=position, id=position, text="", status=status)


PROMPT = Prompt(ids=[0, 1])
SHOWN = [_token(2), _token(3, "provisional"), _token(4, "provisional")]
END = Done(reason="length", verified=True, text="", stats={})
CONFIRM = Confirm(start=3, stop=4)
RETRACT = Retract(start=4, stop=5, characters=0)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ([*SHOWN, CONFIRM, RETRACT, _token(4), END], ""),
        ([*SHOWN, CONFIRM, Confirm(start=4, stop=5), END], ""),
        ([*SHOWN, Adopt(start=3, stop=5), _token(5)], ""),
        ([_token(3)], "a gap"),
        ([*SHOWN, RETRACT, _token(5, "provisional")], "a gap"),
        ([*SHOWN, _token(5)], "behind provisional text"),
        ([*SHOWN, Confirm(start=4, stop=5)], "behind provisional text"),
        ([*SHOWN, CONFIRM, CONFIRM], "final twice"),
        ([*SHOWN, Confirm(start=3, stop=6)], "never told"),
        ([*SHOWN, Retract(start=3, stop=4, characters=0)], "from the middle"),
        ([*SHOWN, CONFIRM, Retract(start=3, stop=5, characters=0)], "final text was taken back"),
        ([*SHOWN, Adopt(start=3, stop=4)], "in the middle"),
        ([*SHOWN, END], "never resolved"),
        ([_token(2), END, _token(3)], "after the end"),
    ],
)
def test_a_story_that_cannot_be_true_is_found(events: list[Event], wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong) if wrong else contextlib.nullcontext():
        transcript = Reader()
        for event in (PROMPT, *events):
            transcript.take(event)


async def test_an_error_for_ever_ends_in_each_mode_of_the_endpoint() -> None:
    """With little patience. `make torture` waits as long as the modes do; bounds of time are shown
    in virtual time."""
    cells = await table(
        demo_device(), ["busy to every round", "internal to every open"], patience=1.0
    )
    assert len(cells) == 6
    assert {(one.mode, one.finish) for one in cells} == {
        ("keep", "length"),
        ("provisional", "length"),
        ("hold", "not_verified"),
    }
