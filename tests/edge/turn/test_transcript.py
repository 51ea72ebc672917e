"""Verified and provisional text brought together: any order of events ends in the target's text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edge_client.events import Adopt, Confirm, Event, Prompt, Retract, Token
from edge_client.turn.transcript import Transcript
from moa.logprobs import TokenLogprobs
from moa.text_stream import TextStream
from moa.wire import ClientSession
from moa.wire.finish import TurnRules
from tests.edge.reader import Reader
from tests.edge.turn.world import Letters

PROMPT = [1, 2, 3]


def turn(*written: int, **how: Any) -> Transcript:
    """A turn in which these tokens were written offline."""
    codec: Any = Letters()
    rules = TurnRules(start=3, max_new_tokens=50, max_context=500, eos_ids=frozenset({9}))
    made = Transcript(ClientSession(list(PROMPT)), rules, codec.decode, TextStream(codec), **how)
    for token in written:
        made.extend(token)
    return made


def verified(a: Transcript, *tokens: int, finish: Any = "") -> None:
    a.session.log += tokens
    a.session.finish = finish
    a.absorb()


def test_verified_tokens_have_the_log_probabilities_that_were_told() -> None:
    a = turn(10, 11, 12)
    own = {position: TokenLogprobs(-position / 8) for position in range(3, 7)}
    a.session.token_logprobs |= own
    verified(a, 10, 11, 20)
    events = a.drain()
    assert [event.logprobs for event in events[:3] if isinstance(event, Token)] == [None] * 3
    assert events[3] == Confirm(start=3, stop=5, logprobs=(own[3], own[4]))
    assert events[-1] == Token(position=5, id=20, text="T", status="verified", logprobs=own[5])


def test_rewind_retracts_from_the_first_difference() -> None:
    a = turn(10, 11, 12)
    verified(a, 10, 20)
    assert a.drain()[3:] == [
        Confirm(start=3, stop=4),
        Retract(start=4, stop=6, characters=1),
        Token(position=4, id=20, text="T", status="verified"),
    ]
    assert a.stream.text == "JT"
    assert a.ids == [*PROMPT, 10, 20]


def test_keep_goes_on_from_what_was_written() -> None:
    a = turn(10, 11, 12, on_reconnect="keep")
    a.session.settled = 3
    a.session.held.add(0, 5)
    old = a.session
    verified(a, 10, 20)
    assert a.drain()[3:] == [Confirm(start=3, stop=4), Adopt(start=4, stop=6)]
    assert a.superseded is old
    assert a.session is not old
    assert a.session.log == [*PROMPT, 10, 11, 12]
    assert a.session.open().generated == 3
    assert list(a.session.held) == [(0, 4)]
    verified(a, 13)
    assert a.output == [10, 11, 12, 13]
    assert not a.verified


@pytest.mark.parametrize("policy", ["rewind", "keep"])
def test_text_written_past_the_targets_end(policy: Any) -> None:
    a = turn(10, 11, on_reconnect=policy)
    verified(a, 10, finish="stop")
    assert a.output == ([10] if policy == "rewind" else [10, 11])
    assert a.over == (policy == "rewind")


@pytest.mark.parametrize(("second", "over"), [(9, True), (12, False)])
def test_an_end_written_offline_is_provisional_until_it_is_confirmed(
    second: int, over: bool
) -> None:
    a = turn(10, 9)
    assert a.finish == "eos"
    assert not a.over
    verified(a, 10, second, finish="eos" if over else "")
    assert (a.over, bool(a.finish)) == (over, over)
    assert a.output == [10, second]
    assert a.verified


def test_any_history_is_told_consistently() -> None:
    """Random texts, written and verified in random pieces; the strict reader checks every event."""
    for seed in range(300):
        rng = random.Random(seed)
        truth = [rng.randrange(10, 60) for _ in range(30)]
        a = turn()
        reader = Reader()
        events: list[Event] = [Prompt(ids=PROMPT)]
        while len(a.session.log) < 3 + len(truth):
            done = len(a.session.log) - 3
            if rng.random() < 0.5 and len(a.output) < len(truth):
                right = a.output == truth[: len(a.output)] and rng.random() < 0.8
                a.extend(truth[len(a.output)] if right else 61)
            else:
                verified(a, *truth[done : done + rng.randrange(1, 4)])
            events += a.drain()
        for event in events:
            reader.take(event, 0.0)
        assert reader.tokens == truth
        assert all(reader.verified)
        assert reader.text == Letters().decode(truth)
