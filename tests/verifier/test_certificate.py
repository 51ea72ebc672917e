"""Until when the certificate of a port is valid, and what is told of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from cloud_verifier.certificate import DAY_SECONDS, Certificate
from cloud_verifier.logs import log
from tests.torture.tls import certificate
from tests.verifier import kit


@pytest.mark.parametrize(
    ("days", "said"),
    [(-2, "is not valid before"), (1, ""), (20, "expires on"), (40, "has expired on")],
)
def test_a_certificate_that_devices_refuse_is_told_at_the_start(
    days: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was served without a word, and devices answered alone."""
    chain, _ = certificate(tmp_path)  # for 30 days
    with caplog.at_level("WARNING", "cloud_verifier"), mock.patch.object(log, "propagate", True):
        Certificate(chain).warn_of_its_end(time.time() + days * DAY_SECONDS)
    assert len(caplog.messages) == bool(said)
    assert all(said in message for message in caplog.messages)


def test_a_file_without_a_certificate_is_left_to_who_loads_it(tmp_path: Path) -> None:
    nothing = Certificate(tmp_path / "nothing")
    assert nothing.end == 0
    nothing.warn_of_its_end(time.time())


def test_a_certificate_that_ends_soon_is_told_once_a_day_and_a_renewed_file_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A verifier that runs for 90 days said nothing but at its start."""
    chain, _ = certificate(tmp_path)  # for 30 days
    began = time.time()
    in_use = Certificate(chain, quiet_until=began + DAY_SECONDS)
    assert in_use.end == pytest.approx(began + 30 * DAY_SECONDS, abs=600)
    half_days = [began + half * DAY_SECONDS / 2 for half in range(64)]
    with caplog.at_level("WARNING", "cloud_verifier"), mock.patch.object(log, "propagate", True):
        for now in half_days:
            in_use.warn_of_its_end(now)
        assert len(caplog.messages) == 16, "14 days before its end, and two after it"
        assert caplog.messages[0].endswith("renew it, and restart")
        assert "has expired on" in caplog.messages[-1]
        renewed = tmp_path / "renewed"
        renewed.mkdir()
        certificate(renewed, days=60)[0].replace(chain)
        in_use.warn_of_its_end(half_days[-1] + DAY_SECONDS)
        assert caplog.messages[-1].endswith("its file has a newer one, which is read at a restart")
        began_later = Certificate(chain, quiet_until=began)
        began_later.warn_of_its_end(began - 2 * DAY_SECONDS)
    assert len(caplog.messages) == 17


async def test_a_verifier_says_when_its_certificate_ends_and_looks_at_it_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_verifier.server._SWEEP_SECONDS", 0.01)
    looked = asyncio.Event()
    monkeypatch.setattr(Certificate, "warn_of_its_end", lambda *_: looked.set())
    chain, key = certificate(tmp_path)
    settings = replace(kit.SETTINGS, tls_cert=chain, tls_key=key)
    async with kit.verifier(settings) as running, asyncio.timeout(300):
        await looked.wait()
        told = running.metrics.registry.get_sample_value("moa_certificate_end_time_seconds")
    assert told == Certificate(chain).end
