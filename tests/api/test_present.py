"""The text that a client gets in each mode, for any order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa.api.answer import AnswerEvent, Began, Cut, Mode, Piece, Reason, Verified
from moa.api.errors import ApiError
from moa.api.present import Presenter, Show, within_patience
from tests.api.scripted import ended


def shown(presenter: Presenter, *events: AnswerEvent) -> tuple[str, list[Show]]:
    """The client's text at the end, and the steps to it."""
    text = ""
    shows = []
    for event in events:
        if (show := presenter.take(event)) is not None:
            shows.append(show)
            text = text[: show.cut] + show.text
            assert show.verified <= len(text)
    return text, shows


def test_hold_shows_only_what_is_verified() -> None:
    text, shows = shown(
        Presenter("hold"), Piece("a"), Piece("b", False), Piece("c", False), Verified(2)
    )
    assert text == "ab"
    assert all(show.cut is None for show in shows)


@pytest.mark.parametrize(
    ("half", "verified", "reason", "why"),
    [
        ("half of it", True, "guard", " (guard)"),  # it ended only because the verifier was missing
        ("half of it", True, "link", " (link)"),
        ("half", False, "link", " (link)"),
        ("half", False, "eos", ""),  # that unverified text came to its end is no reason
    ],
)
def test_hold_never_takes_half_an_answer_for_a_whole_one(
    half: str, verified: bool, reason: Reason, why: str
) -> None:
    end = ended("half of it", verified=verified, reason=reason)
    with pytest.raises(ApiError) as refused:
        shown(Presenter("hold"), Piece(half), end)
    assert (refused.value.status, refused.value.code) == (503, "not_verified")
    assert str(refused.value).endswith(f"in mode hold{why}")
    assert shown(Presenter("provisional"), Piece(half), end)[0] == "half of it"


async def _writing(*steps: AnswerEvent, closed: list[bool]) -> AsyncGenerator[AnswerEvent, None]:
    """A device that goes on alone after these events, for ever."""
    try:
        for step in steps:
            yield step
        while True:
            yield Piece("x", False)
            await asyncio.sleep(0.005)
    finally:
        closed.append(True)


@pytest.mark.parametrize(
    "steps",
    [(), (Piece("a"),), (Piece("a", False), Verified(1)), (Piece("ab", False), Verified(1))],
    ids=["from the start", "after verified text", "after a check", "after half a check"],
)
async def test_patience_bounds_an_answer_in_hold_that_a_device_goes_on_with(
    steps: tuple[AnswerEvent, ...],
) -> None:
    taken = []
    closed = list[bool]()
    writing = _writing(*steps, closed=closed)

    async def take() -> None:
        async for event in within_patience(writing, "hold", 0.05, 30.0):
            taken.append(event)

    with pytest.raises(ApiError) as refused:
        await asyncio.wait_for(take(), 30)
    assert refused.value.code == "not_verified"
    assert taken[: len(steps)] == list(steps)
    assert len(taken) > len(steps)
    await writing.aclose()
    assert closed


@pytest.mark.parametrize("mode", ["hold", "provisional", "keep"])
async def test_an_answer_without_any_token_ends(mode: Mode) -> None:
    async def silent(*events: AnswerEvent) -> AsyncGenerator[AnswerEvent, None]:
        for event in (Began(), *events):
            yield event
        await asyncio.sleep(30)

    with pytest.raises(ApiError, match="did not answer in time"):
        _ = [event async for event in within_patience(silent(), mode, 30.0, 0.05)]
    if mode != "hold":
        begun = within_patience(silent(Piece("", False)), mode, 0.05, 0.05)
        with pytest.raises(TimeoutError):  # the turn itself bounds what follows
            async with asyncio.timeout(0.2):
                _ = [event async for event in begun]


async def test_patience_is_for_unverified_text_alone() -> None:
    async def slow() -> AsyncGenerator[AnswerEvent, None]:
        for event in (
            Piece("a"),
            Piece("b", False),
            Verified(2),
            Piece("c", False),
            Cut(2),
            ended("ab"),
        ):
            yield event
            await asyncio.sleep(0.2 if not isinstance(event, Piece) or event.verified else 0.0)

    assert len([event async for event in within_patience(slow(), "hold", 0.1, 30.0)]) == 6

    async def at_once() -> AsyncGenerator[AnswerEvent, None]:
        for event in (Piece("a", False), Piece("b", False), Verified(2)):
            yield event

    count = 0
    async for _ in within_patience(at_once(), "hold", 0.05, 30.0):
        await asyncio.sleep(0.1)  # a client that reads slowly
        count += 1
    assert count == 3


@given(
    st.lists(st.one_of(st.text("ab", max_size=3), st.integers(0, 12)), max_size=12),
    st.sampled_from(["provisional", "keep", "hold"]),
)
def test_the_client_always_ends_with_the_text(steps: list[str | int], mode: Mode) -> None:
    events: list[AnswerEvent] = []
    text = ""
    for step in steps:
        if isinstance(step, str):
            events.append(Piece(step, False))
            text += step
        elif mode != "keep" and step < len(text):
            events.append(Cut(step))
            text = text[:step]
    assert shown(Presenter(mode), *events, ended(text))[0] == text
