"""Replicas on Ray Serve: what `python -m benchmarks ray_serve` measures, small. Needs what `make ray` installs."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="`make ray` installs it")

from benchmarks.server import ray_serve

PATIENCE = 1200


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
async def test_no_token_is_lost_when_replicas_come_go_and_die() -> None:
    result = await ray_serve.measure(ray_serve.Options(devices=12, passes=2))
    assert not ray_serve.faults(result)
    dropped = next(run for run in result["runs"] if "dropped" in run["what"])
    assert dropped["returns"] > 40
    assert dropped["same_verifier"] >= 0.95
    killed, scaled = result["runs"][-2:]
    assert killed["recovery_ms"], "a device lost its replica"
    assert "1, 3 and 1" in scaled["what"]
