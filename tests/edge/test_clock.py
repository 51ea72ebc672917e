"""The clock on the wall is set forwards and back while programs run: nothing waits by it, and no
text depends on it."""

from __future__ import annotations

import random
import time

import pytest

from edge_client.client import EdgeClient
from tests.edge import kit
from tests.edge.cutting import CuttingLink
from tests.edge.test_exact import COUNT, truth
from tests.verifier import kit as verifier_kit

_YEAR = 3600 * 24 * 365


class _Restless:
    """A clock that is years off at each look, in either direction."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._true = time.time
        self.looks = 0

    def seconds(self) -> float:
        self.looks += 1
        return self._true() + self._rng.uniform(-20, 20) * _YEAR

    def nanoseconds(self) -> int:
        return int(1e9 * self.seconds())


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_answers_through_cuts_are_the_same_by_a_restless_clock(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Restless()
    monkeypatch.setattr(time, "time", clock.seconds)
    monkeypatch.setattr(time, "time_ns", clock.nanoseconds)
    async with (
        kit.verifier() as running,
        CuttingLink(running.transport.port, seed=1) as link,
    ):
        for seed in range(3):
            ids = verifier_kit.prompt(seed, 12)
            expected = truth(ids)
            device = kit.oracle([*ids, *expected], 0.8, seed=seed)
            settings = kit.FAST | {"draft": draft, "max_new_tokens": COUNT}
            async with EdgeClient(verifier=link.url, device=device, **settings) as client:
                reader = await kit.transcribe(client, ids)
            assert reader.tokens == expected
            assert all(reader.verified)
    assert time.time() != time.time(), "the clock was the restless one"
