"""Experiments that start verifiers, with tiny options: each measures, and tells what it found."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.experiments import EXPERIMENTS

SMALL: dict[str, dict[str, Any]] = {
    "client_links": {"prompts": 2, "tokens": 8, "links": ("loopback", "wifi"), "lanes": 2},
    "client_slow": {
        "prompts": 2,
        "tokens": 8,
        "links": ("loopback",),
        "steps": (10.0,),
        "lanes": 1,
        "repeats": 2,
    },
    "client_offline": {"prompts": 2, "tokens": 16},
    "client_reconnect": {"prompts": 2, "gaps": (0.0, 1.0), "speed": 20.0},
    "client_everyday": {"every": 60, "tokens": 8},
    "capacity": {"step_ms": 0.0, "start": 2, "most": 2},
    "server_load": {"clients": (2,), "tokens": 8, "repeats": 1, "long": 200},
    "masks": {"repeats": 1, "questions": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SMALL.items(), ids=SMALL)
def test_an_experiment_measures_and_tells(
    name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = bench.parser_for(EXPERIMENTS[name]).parse_args([])
    vars(args).update(options)
    bench.run(EXPERIMENTS[name], args)  # which raises where a text is not the target's own
    assert "| ---" in capsys.readouterr().out
