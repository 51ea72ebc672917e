"""The text that a client gets in each mode, for any order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa.api.answer import AnswerEvent, Began, Cut, Mode, Piece, Reading, Reason, Verified
from moa.api.errors import ApiError, bad
from moa.api.present import Patience, Presenter, Show, next_in_time
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


def test_the_error_of_hold_says_why_nothing_was_verified() -> None:
    """A wrong key, a spent budget and a dead engine looked alike, and like a lack of patience."""
    end = msgspec.structs.replace(ended("a", verified=False), why="the upstream refuses the key")
    end = msgspec.structs.replace(end, refused=True)
    with pytest.raises(ApiError, match=r"not verified \(the upstream refuses the key\)") as refused:
        shown(Presenter("hold"), Piece("a"), end)
    patience = Patience("hold", seconds=5.0, first=30.0, now=0.0)
    assert patience.too_late().headers() == {"Retry-After": "5"}
    patience.trouble = "the upstream refuses the key"
    patience.refused = True
    none = patience.too_late()
    patience.take(Piece("a"), 1.0)
    for error in (refused.value, none, patience.too_late()):
        assert error.body()["error"]["moa"] == {"why": "the upstream refuses the key"}
        assert "the upstream refuses the key" in str(error)
        assert error.headers() == {"X-Should-Retry": "false"}, "to wait does not mend it"
    assert "moa" not in bad("no").body()["error"]


@pytest.mark.parametrize(
    "steps",
    [(), (Piece("a"),), (Piece("a", False), Verified(1)), (Piece("ab", False), Verified(1))],
    ids=["from the start", "after verified text", "after a check", "after half a check"],
)
def test_patience_bounds_an_answer_in_hold_that_a_device_goes_on_with(
    steps: tuple[AnswerEvent, ...],
) -> None:
    patience = Patience("hold", seconds=5.0, first=30.0, now=0.0)
    for step in steps:
        patience.take(step, 1.0)
    now = 2.0
    while patience.deadline is None or now < patience.deadline:
        patience.take(Piece("x", False), now)
        now += 1.0
        assert now < 60.0, "it would go on for ever"
    assert now == 7.0 if steps != (Piece("ab", False), Verified(1)) else now == 6.0
    assert patience.too_late().code == "not_verified"


@pytest.mark.parametrize("mode", ["hold", "provisional", "keep"])
def test_an_answer_without_any_token_ends(mode: Mode) -> None:
    patience = Patience(mode, seconds=5.0, first=30.0, now=0.0)
    patience.take(Began(), 1.0)
    assert patience.deadline == 30.0
    patience.take(Reading(1, 9), 20.0)
    assert patience.deadline == 50.0, "the verifier is not silent"
    assert "no answer came in time" in str(patience.too_late())
    patience.take(Piece("", False), 40.0)
    if mode == "hold":
        assert patience.deadline == 45.0
    else:
        assert patience.deadline is None, "the turn itself bounds what follows"


def test_patience_is_for_unverified_text_alone() -> None:
    patience = Patience("hold", seconds=5.0, first=30.0, now=0.0)
    deadlines = []
    for event in (
        Piece("a"),
        Piece("b", False),
        Piece("c", False),
        Verified(3),
        Piece("d", False),
        Cut(3),
        ended("abc"),
    ):
        patience.take(event, 1.0)
        deadlines.append(patience.deadline)
    assert deadlines == [None, 6.0, 6.0, None, 6.0, None, None]


def test_nobody_waits_while_a_client_reads() -> None:
    patience = Patience("hold", seconds=5.0, first=30.0, now=0.0)
    patience.take(Piece("a", False), 1.0)
    patience.client_took(100.0)
    assert patience.deadline == 106.0
    patience.take(Verified(1), 2.0)
    patience.client_took(100.0)
    assert patience.deadline is None


async def test_events_are_taken_until_their_end_or_the_deadline() -> None:
    async def one() -> AsyncGenerator[str, None]:
        yield "event"

    async def silent() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield "never"

    async def fails() -> AsyncGenerator[str, None]:
        raise TimeoutError("its own")
        yield "never"

    now = asyncio.get_running_loop().time()
    patient = Patience("hold", seconds=1e6, first=1e6, now=now)
    events = one()
    assert await next_in_time(events, patient) == "event"
    assert await next_in_time(events, patient) is None
    with pytest.raises(TimeoutError, match="its own"):
        await next_in_time(fails(), patient)
    impatient = Patience("hold", seconds=0.0, first=0.0, now=now)
    with pytest.raises(ApiError, match="no answer came in time"):
        await next_in_time(silent(), impatient)


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
