"""An outage in an answer: what is told of it."""

from __future__ import annotations

import pytest

from benchmarks.device import reconnect


@pytest.mark.slow
async def test_an_outage_in_an_answer() -> None:
    result = await reconnect.measure(reconnect.Options(prompts=2, gaps=(0.0, 1.0), speed=20.0))
    assert len(result["runs"]) == 4
    for run in result["runs"]:
        assert (run["offline_tokens"] > 0) == (run["gap_seconds"] > 0)
        if run["policy"] == "rewind":
            assert run["wholly_verified"] == run["asked"] == 2
    assert "Means of 2 held-out prompts" in reconnect.tables(result)
