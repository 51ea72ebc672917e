from __future__ import annotations

import dataclasses
import logging

import pytest

from cloud_verifier.sessions.channel import log
from moa.wire import Code, Refusal, decode_client
from moa.wire.events import Advanced
from tests.torture.fuzz import Fuzzer, fuzz
from tests.verifier import kit

IDS = kit.prompt(1, 10)
OPEN_WIDE = dataclasses.replace(
    kit.LIMITS,
    max_empty_frames_per_second=10**9,
    max_bytes_per_second=10**9,
    max_refusals_per_second=10**9,
    max_bad_messages=10**9,
    connection_budgets_per_principal=1,
)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_frame_holds_it_is_a_message_or_a_refusal(seed: int) -> None:
    fuzzer, refused = Fuzzer(seed), list[str]()
    for _ in range(1000):
        try:
            decode_client(fuzzer.message())
        except Refusal as refusal:
            refused.append(refusal.code)
    assert set(refused) == {Code.BAD_MESSAGE}
    assert 25 < len(refused) < 975, "some are messages and some are none"


@pytest.mark.timeout(600)
async def test_a_fuzzed_verifier_goes_on_and_nothing_raises(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    settings = dataclasses.replace(kit.SETTINGS, limits=OPEN_WIDE)
    with caplog.at_level(logging.WARNING, logger="cloud_verifier"):
        async with kit.verifier(settings) as running, kit.client(running) as good:
            session = await good.start(IDS, max_new_tokens=100)
            for seed in range(3):
                counts = await fuzz(running.transport.port, "", 150, seed, a_connection=50)
                assert counts["connections"] >= 3
                assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)
            assert session.log[len(IDS) :] == kit.generated(IDS, len(session.log) - len(IDS))
            assert running.engine.running
            assert "moa_quarantined_sessions_total 0.0" in running.service.metrics.page().decode()
    assert not [record for record in caplog.records if record.exc_info]
