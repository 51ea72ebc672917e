"""What the verifier's load benchmark counts, against a verifier in this process."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.server.crowd import crowd
from testing.devices import scripts
from testing.metrics_page import Histogram, gained, look
from tests.verifier import kit


def test_a_histogram_is_what_has_come_between_two_looks() -> None:
    before = {
        'h_bucket{le="1.0"}': 5.0,
        'h_bucket{le="2.0"}': 5.0,
        'h_bucket{le="+Inf"}': 5.0,
        "h_sum": 2.0,
    }
    after = {
        'h_bucket{le="1.0"}': 5.0,
        'h_bucket{le="2.0"}': 9.0,
        'h_bucket{le="+Inf"}': 10.0,
        "h_sum": 11.0,
    }
    found = Histogram.of(gained([(before, after)]), "h")
    assert found.counts == (0, 4, 1)
    assert (found.count, found.mean) == (5, 9.0 / 5)
    assert found.quantile(0.4) == pytest.approx(1.5)
    assert found.quantile(0.8) == pytest.approx(2.0)
    assert found.shares() == {"2": 0.8, "inf": 0.2}
    labelled = {
        f'h_bucket{{kind="a",{name[9:]}' if "bucket" in name else 'h_sum{kind="a"}': n
        for name, n in after.items()
    }
    assert Histogram.of(labelled | after, "h", 'kind="a"').counts == (5, 4, 1)
    assert gained([(before, after), (before, after)])["h_sum"] == 18.0


async def test_a_crowd_is_told_the_targets_text_and_counted_while_it_is_complete() -> None:
    settings = dataclasses.replace(kit.SETTINGS, slots=5)
    async with kit.verifier(settings) as running:
        url = running.transport.url
        said = await scripts(url, 4, length=20, tokens=24, rate=0.7, nodes=6)
        for records in ("off", "int8"):
            run = await crowd(url, said, records)  # type: ignore[arg-type]
            assert 0 < run.tokens <= 4 * 24
            assert run.rounds == len(run.round_ms) <= run.tokens
            assert run.rate > 0
        rows = Histogram.of(gained([(run.before, run.after)]), "moa_batch_rows")
        assert rows.count > 0
        assert (await look(url))["moa_slots_free"] == 5
