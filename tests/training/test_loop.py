from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from moa.errors import UsageError
from moa.training.data import Batch, PackedRows
from moa.training.loop import Loop, LoopSettings, Loss
from testing.close import assert_rounded
from tests.training.conftest import in_processes


class Bigrams:
    """The smallest task there is: a table of the next token."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        ids = torch.from_numpy(batch.ids)
        wanted = torch.from_numpy(
            batch.wanted[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1])
        )
        logits = self.module(ids[:, :-1][wanted]).float()
        total = nn.functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="sum")
        return Loss(
            total,
            wanted.sum().float(),
            {"agree": (logits.argmax(-1) == ids[:, 1:][wanted]).float().sum()},
        )


def settings(**changes) -> LoopSettings:
    return LoopSettings(
        **(
            {"steps": 8, "batch": 2, "warmup": 2, "precision": "fp32", "checkpoint_every": 3}
            | changes
        )
    )


def losses(loop: Loop, **run) -> list[float]:
    return [entry["loss"] for entry in loop.run(**run)]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_stopped_run_goes_on_exactly(rows: PackedRows, tmp_path: Path, optimizer: str) -> None:
    chosen = settings(optimizer=optimizer)
    whole = losses(Loop(Bigrams(), rows, chosen, tmp_path / "whole", quiet=True))
    for stop in (1, 4, None):
        parts = losses(
            Loop(Bigrams(), rows, chosen, tmp_path / "parts", quiet=True), stop_after=stop
        )
    assert parts == whole
    assert {type(value) for value in parts} == {float}, "no step leaves tensors behind"
    assert whole[-1] < whole[0]
    assert Loop(Bigrams(), rows, chosen, tmp_path / "parts", quiet=True).checkpointed_step() == 8


def test_accumulated_micro_steps_are_one_large_step(rows: PackedRows, tmp_path: Path) -> None:
    one = losses(Loop(Bigrams(), rows, settings(batch=4), tmp_path / "one", quiet=True))
    two = losses(Loop(Bigrams(), rows, settings(accumulate=2), tmp_path / "two", quiet=True))
    assert_rounded(two, one)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"steps": 9}, {"learning_rate": 1e-3}, {"optimizer": "adam"}, {"batch": 3}],
)
def test_a_checkpoint_of_other_settings_is_refused(
    rows: PackedRows, tmp_path: Path, change: dict[str, object]
) -> None:
    Loop(Bigrams(), rows, settings(), tmp_path, quiet=True).run(stop_after=1)
    with pytest.raises(UsageError, match=r"is of a run with .* not ") as caught:
        Loop(Bigrams(), rows, settings(**change), tmp_path, quiet=True).run()
    assert "--out" in caught.value.hint


def test_a_checkpoint_of_another_shape_or_a_damaged_one_is_refused(
    rows: PackedRows, tmp_path: Path
) -> None:
    Loop(Bigrams(), rows, settings(), tmp_path, quiet=True).run(stop_after=1)
    other = Bigrams()
    other.module = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
    for task in (other, Bigrams()):
        with pytest.raises(UsageError, match="does not fit this run"):
            Loop(task, rows, settings(), tmp_path, quiet=True).run()
        (tmp_path / "checkpoint" / "state.pt").write_bytes(b"not a checkpoint")


def run_until_the_second_checkpoint(rows: Path, out: Path) -> None:
    rename = Path.rename

    def killed_at_the_second(self: Path, to: Path) -> Path:
        if self.name == "state.part" and (out / "checkpoint").is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, to)

    Path.rename = killed_at_the_second  # type: ignore[method-assign, assignment]
    Loop(Bigrams(), PackedRows(rows), settings(), out, quiet=True).run()


def test_kill_9_while_a_checkpoint_is_written_costs_nothing_but_time(
    rows: PackedRows, tmp_path: Path
) -> None:
    whole = losses(Loop(Bigrams(), rows, settings(), tmp_path / "whole", quiet=True))
    out = tmp_path / "out"
    assert in_processes(partial(run_until_the_second_checkpoint, tmp_path / "rows", out)) == [
        -signal.SIGKILL
    ]
    again = Loop(Bigrams(), rows, settings(), out, quiet=True)
    assert again.checkpointed_step() == 3
    assert losses(again) == whole


def test_the_rate_climbs_and_falls() -> None:
    chosen = LoopSettings(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    rates = [chosen.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
