"""Any history of a device and a verifier: whatever happens, in whatever order, the text is the target's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge_client.turn.deadlines import Patience
from moa.wire.messages import Append, Stream, Verify
from tests.edge.turn.world import World

FAULTS = ["", "busy", "quarantined", "unknown_session", "conflict", "draining", "internal", "cancelled", "mute"]
MOST_PER_SECOND = 8
"""Openings, appends and resumes together, on links that are cut all the time."""


class AnyHistory(RuleBasedStateMachine):
    """Turns of one conversation, with faults thrown in."""

    @initialize(
        seed=st.integers(0, 2**32),
        draft=st.sampled_from(["device", "server", "auto", "single"]),
        guess_ahead=st.booleans(),
        right=st.sampled_from([0.7, 0.98]),
        server_right=st.sampled_from([None, 0.7]),
    )
    def begin(self, seed: int, draft: Any, guess_ahead: bool, right: float, server_right: float | None) -> None:
        patience = Patience(offline_after=0.3, settle=1.0)
        self.world = World(
            seed=seed,
            draft=draft,
            count=30,
            right=right,
            patience=patience,
            guess_ahead=guess_ahead,
            server_right=server_right,
        )
        self.seed = seed

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.3, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        if self.world.run(seconds=seconds):
            self._turn_is_over()

    @rule(fault=st.sampled_from(FAULTS), retry_after_ms=st.sampled_from([0, 250]))
    def the_verifier_has_trouble(self, fault: str, retry_after_ms: int) -> None:
        self.world.verifier.fault, self.world.verifier.retry_after_ms = fault, retry_after_ms

    @rule()
    def the_verifier_forgets(self) -> None:
        self.world.verifier.known.clear()

    @rule()
    def the_connection_is_lost(self) -> None:
        self.world.cut()

    @rule(unreachable=st.booleans())
    def the_network_goes_or_comes(self, unreachable: bool) -> None:
        self.world.unreachable = unreachable
        if unreachable:
            self.world.cut()

    @rule(latency=st.sampled_from([0.0, 0.02, 0.5]), forward=st.sampled_from([0.001, 0.05, 1.0]))
    def it_gets_slow_or_fast(self, latency: float, forward: float) -> None:
        self.world.latency, self.world.verifier.forward = latency, forward

    @rule(loss=st.sampled_from([0.0, 0.3]), repeat=st.sampled_from([0.0, 0.5]))
    def messages_are_lost_or_repeated(self, loss: float, repeat: float) -> None:
        self.world.loss, self.world.repeat = loss, repeat

    @rule(draft=st.sampled_from(["device", "server", "none", "auto"]))
    def the_next_turn_is_asked_for(self, draft: Any) -> None:
        """The reader leaves; the round that is running is cancelled; settings change."""
        world = self.world
        cancel = world.machine.session.cancel()
        if cancel is not None:
            world._send(cancel)
        world.draft = draft
        world.log = world.transcript.ids
        self._next_turn()

    @invariant()
    def the_verifier_is_not_pressed(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.most_requests_per_second() <= MOST_PER_SECOND + self.world.connection

    def teardown(self) -> None:
        """When all is well again, the turn ends with the target's text, verified to the last token."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.verifier.fault, world.unreachable, world.loss, world.latency = "", False, 0.0, 0.02
        world.verifier.forward = 0.01
        world.cut()
        world.run(seconds=30)
        world.recheck()
        world.at(10.0, lambda: None)
        assert world.run(seconds=30)
        assert world.answer == world.expected
        assert all(world.reader.verified)
        assert not any(isinstance(message, Append | Stream | Verify) for message in world.strange)

    def _turn_is_over(self) -> None:
        world = self.world
        verified = [token for token, sure in zip(world.answer, world.reader.verified, strict=True) if sure]
        assert verified == world.expected[: len(verified)], "a verified token that is not the target's"
        self._next_turn()

    def _next_turn(self) -> None:
        world, session = self.world, self.world.machine.session
        new = [2 + self.seed % 50, 7]
        ids = [*world.log, *new]
        if world.session_state is not None and not session.unsettled and session.settled == len(session.log):
            session.append(ids[len(session.log) :], max_new_tokens=30)
        else:
            world.left.append(session.id)
            world.session_state = None
        world.log = ids
        world.begin()


AnyHistory.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = AnyHistory.TestCase


def anything(history: AnyHistory, rng: random.Random) -> None:
    """One step of a random history."""
    match rng.randrange(12):
        case 0:
            history.the_verifier_has_trouble(rng.choice(FAULTS), rng.choice([0, 250]))
        case 1:
            history.the_verifier_forgets()
        case 2:
            history.the_connection_is_lost()
        case 3:
            history.the_network_goes_or_comes(rng.random() < 0.3)
        case 4:
            history.it_gets_slow_or_fast(rng.choice([0.0, 0.02, 0.5]), rng.choice([0.001, 0.05, 1.0]))
        case 5:
            history.messages_are_lost_or_repeated(rng.choice([0.0, 0.3]), rng.choice([0.0, 0.5]))
        case 6:
            history.the_next_turn_is_asked_for(rng.choice(["device", "server", "none", "auto"]))
        case _:
            history.time_passes(rng.choice([0.01, 0.05, 0.3, 1.0]))


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_steps(seed: int) -> None:
    """The same, with luck for a guide instead of Hypothesis: 500 steps a seed."""
    rng = random.Random(seed)
    history = AnyHistory()
    history.begin(
        seed, rng.choice(["device", "server", "auto"]), seed % 4 > 0, rng.choice([0.7, 0.98]), rng.choice([None, 0.7])
    )
    for _ in range(500):
        anything(history, rng)
        if rng.random() < 0.1:
            history.the_verifier_is_not_pressed()
    history.teardown()
