"""A device whose user has used up his own rate at the verifier: it gets all of that rate, whatever
it guesses or writes meanwhile, and the user is told why no more comes."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.events import Link, Notice
from edge_client.turn.reachability import RATE
from moa.wire import Limits
from moa.wire.messages import Append, Foresee, Open, Stream
from tests.edge.turn.world import World

RATE_OF_TEN = Limits(max_tokens_per_second=10.0, max_burst_tokens=60)
TOKENS = 142
USED_UP = f"your rate at the verifier is used up ({RATE})"
WAYS: dict[str, dict[str, Any]] = {
    "auto": {"draft": "auto", "guess_ahead": True},
    "auto, slow forwards": {"draft": "auto", "guess_ahead": True, "forward": 0.25},
    "auto beside drafts of the server": {
        "draft": "auto",
        "guess_ahead": True,
        "server_right": 0.5,
    },
    "device": {"draft": "device"},
    "device, ahead": {"draft": "device", "guess_ahead": True},
}


def seconds(limits: Limits = RATE_OF_TEN, *, count: int = TOKENS, **more: Any) -> float:
    """How long an answer takes, which must be the target's, and verified."""
    world = World(count=count, limits=limits, **more)
    assert world.run() == "length"
    assert world.answer == world.expected
    assert world.reader.unverified == 0
    return world.now


def plain(limits: Limits = RATE_OF_TEN, **more: Any) -> float:
    """The same of who sends no guess, such as the verifier's own API."""
    kept = {name: value for name, value in more.items() if name in ("forward", "count")}
    return seconds(limits, draft="none", **kept)


@pytest.mark.parametrize("right", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("way", WAYS)
def test_a_device_at_a_limit_gets_its_rate_however_it_guesses(way: str, right: float) -> None:
    more = WAYS[way]
    of_the_api = plain(**more)
    assert of_the_api >= (TOKENS - RATE_OF_TEN.max_burst_tokens) / 10
    assert seconds(right=right, **more) <= 1.3 * of_the_api


def links(world: World) -> list[Link]:
    return [event for event in world.reader.events if isinstance(event, Link)]


def test_while_its_rate_is_used_up_a_device_sends_no_guesses() -> None:
    world = World(count=TOKENS, limits=RATE_OF_TEN, draft="device", guess_ahead=True)
    told_at = []
    world.at(0.0, lambda: None)
    while not world.run(seconds=0.05):
        if not told_at and links(world)[-1:] == [Link(state="limited", detail=USED_UP)]:
            told_at.append(world.now)
    assert told_at
    late_guesses = [at for at, message in world.sent if isinstance(message, Foresee)]
    assert late_guesses, "before, they were of use"
    assert max(late_guesses) < told_at[0] + 0.1


def test_a_user_is_told_once_that_his_rate_is_used_up_and_not_that_the_verifier_is_late() -> None:
    world = World(count=TOKENS, limits=RATE_OF_TEN, draft="auto", guess_ahead=True)
    world.run()
    assert links(world) == [Link(state="online"), Link(state="limited", detail=USED_UP)]
    assert world.machine.stats.offline_tokens == 0, "no pause is long enough to be written over"


@pytest.mark.parametrize("draft", ["device", "none"])
def test_of_a_long_pause_he_is_told_when_it_ends_and_what_is_written_meanwhile_costs_nothing(
    draft: Any,
) -> None:
    """A prompt above the burst is taken whole, and the wait is behind it."""
    prompt = [3 + i % 50 for i in range(90)]
    more: dict[str, Any] = {"prompt": prompt, "count": 60, "draft": draft}
    world = World(limits=RATE_OF_TEN, right=0.3, **more)
    world.run()
    assert world.answer == world.expected
    assert world.reader.unverified == 0
    assert world.machine.stats.offline_tokens > 0, "it is written over, as any long wait"
    assert "late" not in world.reader.states
    details = [link.detail for link in links(world) if link.state == "limited"]
    assert details[0] == f"{USED_UP}: it goes on in 4 s"
    of_text = (len(prompt) - RATE_OF_TEN.max_burst_tokens + 60) / 10
    assert world.now <= 1.3 * of_text


def test_who_is_below_his_rate_again_is_told_that_all_is_well() -> None:
    """With drafts that are right he was at his limit once; then forwards are slower than that."""
    world = World(count=TOKENS, limits=RATE_OF_TEN, draft="none", forward=0.01)

    def slow() -> None:
        world.verifier.forward = 0.3

    world.at(2.0, slow)
    world.run()
    assert [link.state for link in links(world)] == ["online", "limited", "online"]


def test_a_verifier_that_is_silent_behind_such_a_pause_is_late() -> None:
    world = World(count=TOKENS, limits=RATE_OF_TEN, draft="none")
    world.trouble("mute", start=2.0)
    world.run(seconds=7.0)
    assert [link.state for link in links(world)] == ["online", "limited", "late"]


QUESTION = range(3, 19)


def asked_again_in_its_session(world: World, count: int) -> None:
    """The second question was refused at first, and what was sent right behind it, too; it is
    answered in the session of the first one, and the user is not told of a new one."""
    assert world.answer == world.expected
    assert world.reader.unverified == 0
    openings = [message for _, message in world.sent if isinstance(message, Open)]
    appends = [message for _, message in world.sent if isinstance(message, Append)]
    assert len(openings) == 1
    assert len(appends) == count
    assert len(set(map(str, appends))) == 1, "the same one again"
    assert not [event for event in world.reader.events if isinstance(event, Notice)]


@pytest.mark.parametrize("draft", ["auto", "device", "none"])
def test_a_question_at_a_limit_waits_in_its_session(draft: Any) -> None:
    """The conversation was read, and charged, from its beginning."""
    limits = Limits(max_tokens_per_second=3.0, max_burst_tokens=30)
    world = World(count=40, limits=limits, draft=draft)
    world.run()
    asked_at = world.now
    world.next_turn(*QUESTION, count=20)
    assert world.run() == "length"
    asked_again_in_its_session(world, 2)
    assert world.now - asked_at <= 1.3 * (len(QUESTION) + 20) / 3
    assert {link.state for link in links(world)} <= {"limited", "online"}


def test_what_was_sent_behind_a_refused_question_is_sent_again_behind_it() -> None:
    limits = Limits(max_tokens_per_second=3.0, max_burst_tokens=30)
    world = World(count=40, limits=limits, draft="none")
    world.run()
    world.next_turn(*QUESTION, count=20)
    world.run()
    second = [
        type(message)
        for at, message in world.sent
        if at >= world.begun[1] and isinstance(message, Append | Stream)
    ]
    assert second[:4] == [Append, Stream, Append, Stream]


def test_a_question_and_its_stream_that_are_refused_together_are_one_refusal() -> None:
    """As a verifier does that says the same of both: counted twice, the pauses would grow faster."""
    world = World(count=20, draft="none")
    world.run()
    world.verifier.refuses = (Append, Stream)
    world.trouble("busy")
    world.next_turn(*QUESTION, count=20)
    world.run(seconds=0.06)
    assert world.machine.reach.retry.attempts == 1
    world.trouble("")
    world.run()
    asked_again_in_its_session(world, 2)
