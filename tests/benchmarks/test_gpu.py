"""`make gpu` where there is no card: it says so, and its steps run at tiny sizes through Triton's
interpreter."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from benchmarks import gpu
from moa.errors import run_cli

SMALL = (gpu.growing, gpu.prompts, gpu.sampling, gpu.drafting, gpu.weights)
LONG = (gpu.agreement, gpu.bits, gpu.forwards, gpu.serving, gpu.crowd, gpu.training)


def test_without_a_card_it_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as end:
        sys.exit(run_cli("gpu", gpu.main))
    assert end.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "steps", [SMALL, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_its_steps_run_on_a_cpu_and_find_nothing_wrong(
    steps: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton comes for Linux on x86-64 alone")
    results = gpu.run(gpu.rehearsal(), steps)
    assert set(results) == {step.__name__ for step in steps}
    assert f"**{steps[1].__name__}**" in capsys.readouterr().out
    for name, lines in results.items():
        assert lines
        assert all(line.get("ok", True) for line in lines), (name, lines)
