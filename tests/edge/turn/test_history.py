"""Any history of a device and a verifier: whatever happens, in whatever order, the text is the
target's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edge_client.turn.deadlines import Patience
from moa.wire.messages import Append, Stream
from tests.edge.turn.world import World

FAULTS = [
    "",
    "busy",
    "quarantined",
    "unknown_session",
    "conflict",
    "draining",
    "internal",
    "mute",
]
MOST_PER_SECOND = 8
"""Openings, appends and resumes together, on links that are cut all the time."""


class AnyHistory:
    """Turns of one conversation, with faults thrown in by chance."""

    def __init__(self, seed: int, draft: Any, *, guess_ahead: bool) -> None:
        self.chance = random.Random(seed)
        self.new_ids = (2 + seed % 50, 7)
        self.world = World(
            seed=seed,
            draft=draft,
            count=30,
            right=self.chance.choice([0.7, 0.98]),
            patience=Patience(offline_after=0.3, settle=1.0),
            guess_ahead=guess_ahead,
            server_right=self.chance.choice([None, 0.7]),
        )

    def happens(self, steps: int) -> None:
        """So many things, of which half are that time passes."""
        world = self.world
        choice = self.chance.choice
        for _ in range(steps):
            match self.chance.randrange(13):
                case 0:
                    world.verifier.fault = choice(FAULTS)
                    world.verifier.retry_after_ms = choice([0, 250])
                case 1:
                    world.verifier.known.clear()
                case 2:
                    world.cut()
                case 3:
                    world.unreachable = self.chance.random() < 0.3
                    if world.unreachable:
                        world.cut()
                case 4:
                    world.latency = choice([0.0, 0.02, 0.5])
                    world.verifier.forward = choice([0.001, 0.05, 1.0])
                case 5:
                    world.loss = choice([0.0, 0.3])
                    world.repeat = choice([0.0, 0.5])
                case 6:
                    # Of one that began a turn the whole turn is: so it never does here.
                    if world.machine._computes:
                        world.fail_over(choice(["sound", "damaged"]))
                case 7:
                    self._another_turn(choice(["device", "server", "none", "auto"]))
                case _:
                    if world.run(seconds=choice([0.01, 0.05, 0.3, 1.0, 3.0])):
                        self._turn_is_over()
            if self.chance.random() < 0.1:
                assert world.most_requests_per_second() <= MOST_PER_SECOND + world.connection

    def _another_turn(self, draft: Any) -> None:
        """The reader leaves; the round that is running is cancelled; settings change."""
        world = self.world
        if (cancel := world.machine.session.cancel()) is not None:
            world._send(cancel)
        world.fail_over("sound")
        world.draft = draft
        world.log = world.transcript.ids
        world.next_turn(*self.new_ids)

    def _turn_is_over(self) -> None:
        world = self.world
        verified = [
            token for token, sure in zip(world.answer, world.reader.verified, strict=True) if sure
        ]
        assert verified == world.expected[: len(verified)], (
            "a verified token that is not the target's"
        )
        world.fail_over("sound")
        world.next_turn(*self.new_ids)

    def ends_well(self) -> None:
        """When all is well again, the turn ends with the target's text, verified to the last token."""
        world = self.world
        world.fail_over("sound")
        world.verifier.fault = ""
        world.unreachable = False
        world.loss = 0.0
        world.latency = 0.02
        world.verifier.forward = 0.01
        world.cut()
        world.run(seconds=30)
        world.recheck()
        world.at(10.0, lambda: None)
        assert world.run(seconds=30)
        assert world.answer == world.expected
        assert all(world.reader.verified)
        assert not any(isinstance(message, Append | Stream) for message in world.strange)


@pytest.mark.parametrize("seed", range(16))
def test_eight_thousand_steps(seed: int) -> None:
    history = AnyHistory(
        seed, ["device", "server", "auto", "none"][seed // 2 % 4], guess_ahead=seed % 2 > 0
    )
    history.happens(500)
    history.ends_well()
