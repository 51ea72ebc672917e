"""Streams that the device foresees, in virtual time: faster than rounds, and exact whatever happens
to guesses."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import msgspec
import pytest

from edge_client.turn.controller import WhoDrafts
from edge_client.turn.deadlines import Patience
from moa.wire import encode
from moa.wire.messages import Foresee, Stream
from tests.edge.turn import world as worlds
from tests.edge.turn.world import World


def asked(world: World, kind: type) -> list[Any]:
    return [message for _, message in world.verifier.requests if isinstance(message, kind)]


def seconds(**settings: Any) -> float:
    world = World(count=100, right=0.9, step=0.003, **settings)
    world.verifier.forward = 0.03
    assert world.run() == "length"
    assert world.answer == world.expected
    return world.now


@pytest.mark.parametrize(("latency", "gain"), [(0.0025, 0.0), (0.03, 1.2), (0.075, 1.1)])
def test_a_round_does_not_wait_for_the_link_and_guesses_never_slow_a_stream_down(
    latency: float, gain: float
) -> None:
    assert seconds(latency=latency) > gain * seconds(latency=latency, guess_ahead=True)
    assert seconds(latency=latency, draft="auto", guess_ahead=True) < seconds(
        latency=latency, draft="none"
    )


def another_turn(world: World) -> float:
    """The seconds of a turn in a session of its own."""
    world.session_state = None
    began = world.now
    world.begin()
    assert world.run() == "length"
    assert world.answer == world.expected
    return world.now - began


def speeds(
    draft: WhoDrafts, right: float, latency: float, forward: float, *, guess_ahead: bool
) -> float:
    """Tokens a second of three turns, after a first one."""
    world = World(
        count=48, right=right, server_right=right, latency=latency, forward=forward, step=0.0025
    )
    world.draft = draft
    world.guess_ahead = guess_ahead
    another_turn(world)
    return 3 * 48 / sum(another_turn(world) for _ in range(3))


@pytest.mark.parametrize("right", [0.6, 0.8, 0.97])
@pytest.mark.parametrize("latency", [0.005, 0.03, 0.075])
@pytest.mark.parametrize("forward", [0.02, 0.1])
def test_auto_is_about_as_fast_as_the_best_way(
    right: float, latency: float, forward: float
) -> None:
    """The drafter is the same on both ends, so which way is best depends on link and target."""
    ways: list[tuple[WhoDrafts, bool]] = [("server", False), ("device", True), ("none", False)]
    best = max(
        speeds(draft, right, latency, forward, guess_ahead=guess_ahead)
        for draft, guess_ahead in ways
    )
    assert speeds("auto", right, latency, forward, guess_ahead=True) > 0.93 * best


EXERCISE, PROSE = (0.9, 0.99, 0.7), (0.5, 0.95, 0.5)
"""Of two kinds of text: the share of easy tokens, and how likely an easy and a hard one is guessed."""
TURNS = {"in turn": [EXERCISE, PROSE] * 4, "one for long": [PROSE] * 6 + [EXERCISE] * 2}


def chances(kind: tuple[float, float, float], log: Sequence[int]) -> float:
    """How likely the token after a log is guessed."""
    share, easy, hard = kind
    return easy if random.Random(f"{list(log[-4:])} {len(log)}").random() < share else hard


def slowness(
    draft: WhoDrafts, turns: Sequence[tuple[float, float, float]], latency: float, forward: float
) -> dict[tuple[float, float, float], float]:
    """By kind of text, the mean logarithm of a turn's seconds; the first two turns do not count."""
    world = World(count=48, server_right=0.9, latency=latency, forward=forward, step=0.003)
    world.draft = draft
    world.guess_ahead = draft != "server"
    taken: dict[tuple[float, float, float], list[float]] = {}
    for number, kind in enumerate(turns):
        share, easy, hard = kind
        world.chances = partial(chances, kind)
        world.verifier.matching = sum((share * easy + (1 - share) * hard) ** n for n in range(1, 5))
        seconds = another_turn(world)
        if number > 1:
            taken.setdefault(kind, []).append(math.log(seconds))
    return {kind: fmean(logarithms) for kind, logarithms in taken.items()}


@pytest.mark.parametrize("turns", TURNS.values(), ids=list(TURNS))
@pytest.mark.parametrize(("latency", "forward"), [(0.03, 0.02), (0.09, 0.06)])
def test_a_turn_of_another_kind_is_judged_by_itself(
    turns: Any, latency: float, forward: float
) -> None:
    """What was easy to guess in an exercise is not in prose, so neither may decide for the other."""
    server, device, auto = (
        slowness(draft, turns, latency, forward) for draft in ("server", "device", "auto")
    )
    for kind in (EXERCISE, PROSE):
        assert math.exp(min(server[kind], device[kind]) - auto[kind]) > 0.93


def no_longer_sure(**how: Any) -> World:
    """The verifier waits for guesses of a drafter that knows the beginning, and not what follows."""
    world = World(draft="auto", guess_ahead=True, right=0.97, forward=0.02, step=0.005, **how)
    while not any(message.waits for message in asked(world, Foresee)):
        assert not world.run(seconds=0.1)
    world.right = 0.2
    return world


def test_in_the_middle_of_an_answer_the_server_drafts_again() -> None:
    world = no_longer_sure(count=300, server_right=0.3, latency=0.03)
    assert world.run() == "length"
    assert world.answer == world.expected
    told = [message.waits for message in asked(world, Foresee) if message.waits is not None]
    assert told[:2] == [True, False]
    assert len(asked(world, Stream)) == 1


def test_a_verifier_that_still_waits_after_a_loss_is_told_to_go_on() -> None:
    """It has not noticed the loss, and the device no longer knows enough to let it wait: without a
    word it would stand still until the device gives the connection up, after 109 s in all."""
    world = no_longer_sure(count=200, server_right=0.5, latency=0.01, seed=2)
    world.verifier.abandon = lambda: None  # type: ignore[method-assign]
    for _ in range(30):
        if not world.run(seconds=0.15):
            world.cut()
    world.run()
    assert world.answer == world.expected
    assert world.now < 10


def test_outcomes_are_counted_by_whether_they_were_foreseen() -> None:
    world = World(count=100, right=0.8, guess_ahead=True)
    world.run()
    outcomes = world.machine.stats.outcomes
    assert {"likeliest", "branch", "missed"} <= set(outcomes)
    assert world.machine.stats.by == {"device": 100}
    sent = sum(isinstance(message, Foresee) for _, message in world.sent)
    assert world.machine.stats.guess_messages == sent, "the last ones may still be on their way"
    assert world.machine.stats.rounds == world.verifier.forwards


def test_guesses_that_the_verifier_has_lost_are_sent_again() -> None:
    world = World(guess_ahead=True)
    world.run(seconds=0.3)
    for session in world.verifier.known.values():
        assert session.guesses is not None
        session.guesses._tree.clear()
    assert world.run() == "length"
    assert world.answer == world.expected
    assert world.now < 5


def test_a_verifier_that_takes_no_guess_in_is_left_alone_by_and_by() -> None:
    world = World(guess_ahead=True, patience=Patience(answer=20.0, settle=100.0))
    world.verifier.most = 0  # whatever it is told, it does nothing
    world.run(seconds=15)
    assert len(asked(world, Foresee)) < 80, (
        "a tree takes five messages, and is sent again ever more rarely"
    )
    world.verifier.most = 12
    assert world.run(seconds=100) == "length"
    assert world.answer == world.expected


def test_what_was_written_alone_is_checked_by_the_stream_that_waits() -> None:
    world = World(count=200, guess_ahead=True, right=1.0, patience=Patience(offline_after=0.2))
    world.trouble("mute", 0.2, 1.2)
    world.run(seconds=1.1)
    assert world.machine.stats.offline_tokens
    assert world.run() == "length"
    assert world.answer == world.expected
    assert all(world.reader.verified)
    assert not world.machine.stats.retracted


@pytest.mark.parametrize("draft", ["device", "auto"])
@pytest.mark.parametrize("prediction", [[], [5, 6, 7]])
def test_a_verifier_that_takes_no_guesses_is_sent_none(
    monkeypatch: pytest.MonkeyPatch, draft: Any, prediction: list[int]
) -> None:
    features = [name for name in worlds.WELCOME.features if name != "foresee"]
    monkeypatch.setattr(
        worlds, "WELCOME", msgspec.structs.replace(worlds.WELCOME, features=features)
    )
    world = World(draft=draft, guess_ahead=True, prediction=prediction)
    world.outage(0.2, 1.5)
    assert world.run() == "length"
    assert world.answer == world.expected
    assert all(world.reader.verified)
    assert not asked(world, Foresee)
    assert not any(message.waits for message in asked(world, Stream))


@pytest.mark.parametrize("draft", ["device", "server", "none", "auto"])
def test_a_text_that_is_known_is_sent_before_the_first_forward(draft: Any) -> None:
    """What was written alone, and what is predicted: whoever drafts, a forward takes many tokens."""
    world = World(draft=draft, count=60, right=1.0, patience=Patience(settle=60.0))
    world.outage(0.0, 4.0)
    assert world.run(seconds=3.5) == ""
    assert len(world.transcript.provisional) == 60
    world.verifier.most = 63
    assert world.run() == "length"
    assert world.answer == world.expected
    assert world.verifier.forwards <= 2
    predicted = World(draft=draft, count=60, prediction=worlds.truth((3, 1, 4), 60), right=0.0)
    predicted.verifier.most = 63
    assert predicted.run() == "length"
    assert predicted.answer == predicted.expected
    assert predicted.verifier.forwards <= 2


def test_a_device_that_does_not_guess_ahead_waits_for_each_answer() -> None:
    world = World(draft="device", guess_ahead=False, right=0.9)
    foreseen: list[float] = []
    send = world._send

    def sent(message: Any) -> None:
        if isinstance(message, Foresee):
            foreseen.append(world.now)
        send(message)

    world._send = sent  # type: ignore[method-assign]
    assert world.run() == "length"
    assert world.answer == world.expected
    round_trip = 2 * world.latency + world.forward
    pauses = [later - sooner for sooner, later in itertools.pairwise(foreseen)]
    assert min(pauses) >= round_trip
    assert world.machine.stats.by == {"device": 40}


@pytest.mark.parametrize(
    "how", [{"guess_ahead": True}, {"draft": "device", "guess_ahead": False}], ids=str
)
def test_bytes_are_waited_for(how: dict[str, Any]) -> None:
    world = World(count=100, max_kbps=8.0, **how)
    real = world._send
    spending = world.machine.spending

    def counted(message: Any) -> None:
        spending.passed += len(encode(message))
        real(message)

    world._send = counted  # type: ignore[method-assign]
    assert world.run() == "length"
    assert world.answer == world.expected
    assert 2500 < spending.passed <= 1000 * (2.0 + world.now) + 500
