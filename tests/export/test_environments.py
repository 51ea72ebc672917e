"""The measurement in other environments: its figures, its frames, and a session in a process of its own."""

from __future__ import annotations

import io
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.export import remote as export_remote
from benchmarks.export.environments import tables
from benchmarks.export.remote import WEB, NotHere, Remote, RemoteDynamic, Runtime, command_of
from benchmarks.export.session import read_frame, write_frame
from benchmarks.export.share import Measured, share
from export.parity import random_steps
from export.runner import OrtRunner
from moa.bundle import Bundle
from moa.errors import MoaError
from tests.export.conftest import Pair

HERE = Runtime("here", (), "CPUExecutionProvider")


def test_a_share_is_of_tokens_per_round_and_its_error_is_the_jackknifes() -> None:
    reference = [Measured([3, 1], [7, 8]), Measured([5], [9])]
    found = [Measured([1, 1, 1], [7, 0]), Measured([5], [9])]
    result = share(found, reference)
    assert result["fp32"] == 4.0  # 4 + 2 + 6 tokens in three rounds
    assert result["acceptance"] == 3.0
    assert result["ratio"] == 0.75
    assert result["same_guess"] == pytest.approx(2 / 3, abs=1e-4)
    without_first, without_second = 6 / 6, 2 / 3
    assert result["se"] == pytest.approx(math.sqrt(0.5 * (without_first - without_second) ** 2 / 2), abs=1e-4)
    assert share(reference, reference)["se"] == 0.0


def test_frames_read_back_as_written() -> None:
    stream = io.BytesIO()
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((1, 0, 4), np.int64)}
    write_frame(stream, arrays, runtime="here")
    stream.seek(0)
    head, found = read_frame(stream) or ({}, {})
    assert head == {"runtime": "here"}
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in arrays.items()}
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
    assert read_frame(stream) is None


def test_another_process_drafts_the_same_and_tells_who_ran_it(
    bundle: Bundle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = bundle.path(bundle.variant("cpu-int8").model), pair.source()
    command = [sys.executable, export_remote.session.__file__, str(model), HERE.provider]
    monkeypatch.setattr(export_remote, "command_of", lambda *_: command)
    remote = Remote(HERE, tmp_path, model)
    runner, here = RemoteDynamic(remote, source.spec), OrtRunner(model, source.spec)
    for step in random_steps(source.spec, source.vocabulary):
        np.testing.assert_array_equal(runner.step(step).top_tokens, here.step(step).top_tokens)
    remote.close()
    assert list(remote.placement) == [HERE.provider]
    assert remote.runtime.startswith("onnxruntime ")


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_remote, "command_of", lambda *_: [sys.executable, "-c", ""])
    with pytest.raises(MoaError, match="process ended"):
        Remote(HERE, tmp_path, tmp_path / "model.onnx")


def test_a_runtime_that_cannot_be_installed_is_reported_as_not_run(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match="no-such-package==0 could not be installed"):
        command_of(Runtime("none", ("--no-index", "no-such-package==0"), "x"), tmp_path, tmp_path)
    assert not (tmp_path / "none" / "ready").exists()
    table = tables({"environments": [{"variant": "npu-qnn", "not_run": "why"}]})
    assert "| npu-qnn | not run: why |" in table


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_browsers_process_says_what_it_lacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "ready").touch()
    with pytest.raises(MoaError, match="process ended"):
        Remote(WEB, tmp_path, tmp_path / "model.onnx")
    assert "Cannot find module 'onnxruntime-web'" in capfd.readouterr().err
