from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from cloud_verifier.sessions.channel import log
from tests.torture.guesses import Text, guess
from tests.torture.test_corpus import OPEN_WIDE
from tests.verifier import kit

KINDS = {
    "right",
    "tree",
    "past",
    "future",
    "root",
    "round",
    "session",
    "foreign",
    "repeated",
    "many",
    "too many",
    "parents",
    "unequal",
    "vocabulary",
    "numbers",
}


async def test_guesses_that_no_device_makes_change_no_text_and_no_other_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    auth, mine, theirs = kit.principals(tmp_path, "mine", "theirs")
    prompts = [kit.prompt(seed, 12) for seed in range(3)]
    texts = [Text(ids, kit.generated(ids, 40)) for ids in prompts]
    settings = dataclasses.replace(kit.SETTINGS, limits=OPEN_WIDE)
    with caplog.at_level(logging.WARNING):
        async with kit.verifier(settings, auth=auth) as running:
            port = running.transport.port
            counts, wrong = await guess(port, (mine, theirs), texts, 150, 1, lanes=2)
            assert "moa_quarantined_sessions_total 0.0" in running.service.metrics.page().decode()
    assert wrong == []
    assert counts.keys() >= KINDS
    assert counts["texts"] >= 2
    assert counts["foreseen"] > 0, "right ones are verified all the same"
    assert counts["record rows"] > 0
    assert not [record for record in caplog.records if record.exc_info]
